"""FocusView: the ragged rows of one step.

Letters used in all stages: S sequences, L block length, T rows that enter a step (not yet cached), M masked ones among
them, N rows kept after eviction, H query heads, D head size, V vocabulary, G tokens a KV page.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED, UNMASKED, CACHED = 0, 1, 2


@dataclass
class FocusView:
    """Rows of a step, those of a sequence contiguous and in block order.

    Attributes:
        sequence: [T] int64, sequence of each row.
        position: [T] int64, block position of each row.
        q_start: [S + 1] int64, first row of each sequence.
        input_ids: [T] int64.
        position_ids: [T] int64, position in the whole text.
        masked: [T] bool, rows that wait for their token.
        pages, offsets: [T] int64, where the KV of each row is stored.
        page_table: [S, P], pages of each sequence.
        history: [S] int64, tokens before the block.
        kv_len: [S] int64, keys that the rows of a sequence see.
        block_length: L.
        max_kv: bound of kv_len on the host.
    """
    sequence: Tensor
    position: Tensor
    q_start: Tensor
    input_ids: Tensor
    position_ids: Tensor
    masked: Tensor
    pages: Tensor
    offsets: Tensor
    page_table: Tensor
    history: Tensor
    kv_len: Tensor
    block_length: int
    max_kv: int

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.history.size(0)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.sequence.size(0)

    def rows_per_sequence(self) -> Tensor:
        """[S] int64."""
        return self.q_start[1:] - self.q_start[:-1]

    def rightmost(self) -> Tensor:
        """[S] int64, largest block position among the rows of each sequence."""
        return self.position[self.q_start[1:] - 1]

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Rows and block positions of the masked tokens, [S, L] int64 each: a sequence's j-th in column j, then -1."""
        rank = self.masked.long().cumsum(0)
        before = torch.cat([rank.new_zeros(1), rank])[self.q_start[:-1]]
        column = torch.where(self.masked, rank - 1 - before[self.sequence], self.block_length)
        # rows that are not masked land in a spare column, which is cut off: no data-dependent shape, no host read-back
        table = self.sequence.new_full((2, self.num_sequences, self.block_length + 1), -1)
        table[0, self.sequence, column] = torch.arange(self.num_rows, device=column.device)
        table[1, self.sequence, column] = self.position
        return table[0, :, :-1], table[1, :, :-1]


def entering_view(ids: Tensor, entering: Tensor, mask: Tensor, history: Tensor, page_table: Tensor, page_size: int,
                  kv_len: Tensor, max_kv: int) -> FocusView:
    """The view of the rows that enter a step.

    Args:
        ids: [S, L] int64, token ids of the blocks (the mask token where undecided).
        entering: [S, L] bool, at least one a sequence.
        mask: [S, L] uint8 of MASKED, UNMASKED, CACHED.
        history: [S] tokens before the block.
        page_table: [S, P].
        page_size: G.
        kv_len: [S] keys that these rows see.
        max_kv: bound of kv_len.
    """
    sequence, position = entering.nonzero(as_tuple=True)
    ends = entering.sum(1).cumsum(0)
    position_ids = history[sequence] + position
    return FocusView(
        sequence=sequence,
        position=position,
        q_start=torch.cat([ends.new_zeros(1), ends]),
        input_ids=ids[sequence, position],
        position_ids=position_ids,
        masked=mask[sequence, position] == MASKED,
        pages=page_table[sequence, position_ids // page_size].long(),
        offsets=position_ids % page_size,
        page_table=page_table,
        history=history,
        kv_len=kv_len,
        block_length=ids.size(1),
        max_kv=max_kv,
    )
