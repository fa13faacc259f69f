"""Selection: which masked tokens stay in the batch (FOCUS, section 3.3)."""
import torch
from torch import Tensor

from ..kernels import reference
from .view import FocusView

# multipliers of a 32-bit multiply-and-shift hash
_MIX = (0x85EBCA6B, 0xC2B2AE35)


def keep_rows(delta: Tensor, rows: Tensor, positions: Tensor, budgets: Tensor, view: FocusView, progress: Tensor,
              ranking: str, fixed: bool, sequential: int) -> Tensor:
    """The rows that stay, [T] bool; decoded rows always stay.

    Args:
        delta: [S, L] importance delta of the masked tokens.
        rows, positions: [S, L] their rows and block positions, -1 beyond the last.
        budgets: [S] K.
        progress: [S] rightmost position that has been through all layers.
        ranking: 'top' is the paper's; 'random' and 'bottom' are its ablations: they replace the ranking and, as every
            fixed budget does, leave out the deviation threshold and the left-neighbour rule.
        fixed: the budget is fixed rather than alpha's.
        sequential: the next this many masked positions are always kept (sequential unmasking), 0 otherwise.
    """
    scores = {'top': lambda: delta, 'bottom': lambda: -delta, 'random': lambda: _noise(view, positions)}[ranking]()
    kept = reference.select(scores, positions, budgets, progress, paper_rules=ranking == 'top' and not fixed)
    kept[:, :sequential] |= positions[:, :sequential] >= 0
    # candidates beyond a sequence's last masked token are written to a spare row, which is cut off
    keep = torch.cat([~view.masked, view.masked.new_zeros(1)])
    keep[torch.where(rows >= 0, rows, view.num_rows)] = kept
    return keep[:-1]


def _noise(view: FocusView, positions: Tensor) -> Tensor:
    """Pseudo-random scores [S, L] of a token's place in the text and the number of masked tokens alone: the kept set of
    a sequence is the same in any batch."""
    value = (view.history[:, None] + positions) * 64 + (positions >= 0).sum(1, keepdim=True)
    value = value & 0xFFFFFFFF
    for factor in _MIX:
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return (value ^ (value >> 16)).float()
