"""FocusState: what a sequence remembers from one denoising step of a block to the next."""
from types import SimpleNamespace

import torch
from torch import Tensor

from ..kernels.layout import FIELDS, FLOATS, pack_bits, state_columns, state_width, unpack_bits

__all__ = ['FocusState', 'first_rows', 'pack_bits', 'unpack_bits']


class FocusState:
    """One row a sequence in a table on the device, [S, state_width(L)] int64, at an address that never changes.

    LMDeploy sends step t+1 before it has seen step t, so this state never visits the host: sequences are appended after
    prefill, reindexed with the batch, and advanced by the step itself. Rows from `count` on belong to none.

    Columns, each [S] unless noted:
        ids: [S, L] token ids of the block, the mask token where undecided.
        pending_ids: [S, L] those of the block before it, while it waits for its commit.
        masked: map of the positions that wait for their token.
        uncached: map of the positions that still enter the step (delayed cache).
        pending: map of the positions of the finished block that this step commits.
        progress: rightmost block position that has been through all layers in this block, -1 if none.
        decoded: tokens decoded by the decode steps of this block.
        steps: decode steps of this block that decoded at least one token.
        history: tokens before the block, a finished one included.
        appendable: tokens that may still be appended, counted from the start of the block.
        random_offset: place in the sequence's random stream.
        output_start: text position of the first generated token.
        alive: 1 while the sequence runs; others enter no row.
        alpha: float64, factor of the budget.
        threshold: float64, confidence from which on a token is decided.

    Attributes:
        own: [S, 2] float64, alpha and threshold that each sequence came with. The columns above are those of the next
            step, which a mode may write over (:meth:`decide_by`). Kept beside the table and not in it: no kernel reads
            them, and a row of state stays what the kernels stride over.
    """

    def __init__(self, sequences: int, length: int, device: torch.device | str) -> None:
        self.length, self.count = length, 0
        self.table = torch.zeros((sequences, state_width(length)), dtype=torch.int64, device=device)
        self.own = torch.zeros((sequences, len(FLOATS)), dtype=torch.float64, device=device)

    @property
    def columns(self) -> SimpleNamespace:
        """Views of the running sequences' columns."""
        return state_columns(self.table[:self.count], self.length)

    def append(self, rows: Tensor) -> None:
        """Add sequences, of :func:`first_rows`; the alpha and threshold there are their own."""
        end = self.count + rows.size(0)
        self.table[self.count:end] = rows
        columns = state_columns(rows, self.length)
        torch.stack([getattr(columns, name) for name in FLOATS], 1, out=self.own[self.count:end])
        self.count = end

    def clear(self) -> None:
        """Drop all sequences."""
        self.table.zero_()
        self.own.zero_()
        self.count = 0

    def take(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [S'], in that order."""
        alive, before, self.count = FIELDS.index('alive') + 2 * self.length, self.count, indices.size(0)
        self.table[:self.count] = self.table[indices]
        self.own[:self.count] = self.own[indices]
        self.table[self.count:before, alive] = 0

    def decide_by(self, alpha: float | None, threshold: float) -> None:
        """What the running sequences decide by from the next step on; those that are appended later, by their own.

        Args:
            alpha: of all; None is each one's own.
            threshold: each one's own where that is higher, else this.
        """
        columns = self.columns
        own = dict(zip(FLOATS, self.own[:self.count].unbind(1), strict=True))
        if alpha is None:
            columns.alpha.copy_(own['alpha'])
        else:
            columns.alpha.fill_(alpha)
        columns.threshold.copy_(own['threshold'].clamp_min(threshold))


def first_rows(ids: Tensor, masked: Tensor, history: Tensor, appendable: Tensor, output_start: Tensor,
               random_offset: Tensor, alpha: float | Tensor, threshold: float | Tensor) -> Tensor:
    """Rows of a state table, [S, state_width(L)] int64, for sequences at the start of a block.

    Nothing of the block counts as having been through the layers, also where prefill has run it: its KV of masked
    positions is not to be seen.

    Args:
        ids: [S, L] int64.
        masked: [S, L] bool, positions that wait for their token.
        history, appendable, output_start, random_offset: [S] int64.
        alpha, threshold: see :class:`FocusState`; [S] float64, or one number for all.
    """
    sequences, length = ids.shape
    rows = torch.zeros((sequences, state_width(length)), dtype=torch.int64, device=ids.device)
    columns = state_columns(rows, length)
    columns.ids.copy_(ids)
    columns.masked.copy_(pack_bits(masked))
    columns.history.copy_(history)
    columns.appendable.copy_(appendable)
    columns.output_start.copy_(output_start)
    columns.random_offset.copy_(random_offset)
    for name, value in {'uncached': -1, 'progress': -1, 'alive': 1, 'alpha': alpha, 'threshold': threshold}.items():
        getattr(columns, name)[:] = value
    return rows
