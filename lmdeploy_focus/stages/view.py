"""FocusView: the tensors of one step.

Letters used in all stages: S sequences, L block length, T rows that enter a step (not yet cached), M masked ones among
them, N rows kept after eviction, R masked ones among those, H query heads, D head size, V vocabulary, E hidden size,
G tokens a KV page.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.layout import Pace, Plan, Rows, report_width
from .state import FocusState

MASKED, UNMASKED, CACHED = 0, 1, 2
STOP_WORDS = 64  # most stop words of a sequence, end-of-sequence tokens included


@dataclass
class FocusView:
    """What a step reads, and what its stages leave for each other.

    On a GPU these are buffers of fixed addresses for the largest batch, which a CUDA graph can hold; on a CPU a view is
    made for each step and is as large as the batch.

    Attributes:
        table: [S, state_width(L)] int64, the state of the sequences; advanced by the step.
        page_table: [S, P] integer, pages of each sequence.
        stop_words: [S, STOP_WORDS] int64, -1 where there is none.
        pace: limits and totals of the step.
        length: L.
        max_kv: bound of a sequence's keys.
        splits: into how many parts attention cuts the keys; None: as the batch has it best.
        entered: the T rows that enter the step.
        plan: the N rows that are kept, R of them sampled.
        partials: importance of the masked tokens in layers 0 and 1, [S, Hkv, L] float32 each.
        report: [S, report_width(L)] int64, what the step tells the host.
    """
    table: Tensor
    page_table: Tensor
    stop_words: Tensor
    pace: Pace
    length: int
    max_kv: int
    splits: int | None = None
    entered: Rows | None = None
    plan: Plan | None = None
    partials: tuple[Tensor, Tensor] | None = None
    report: Tensor | None = None

    @classmethod
    def fixed(cls, state: FocusState, columns: int, max_kv: int, capacity: int,
              splits: int | None = None) -> 'FocusView':
        """Buffers for every sequence of `state`, at most `capacity` rows and pages of `columns` a sequence."""
        sequences, length, device = state.table.size(0), state.length, state.table.device
        return cls(table=state.table,
                   page_table=torch.zeros((sequences, columns), dtype=torch.int32, device=device),
                   stop_words=torch.full((sequences, STOP_WORDS), -1, dtype=torch.int64, device=device),
                   pace=Pace.unlimited(device), length=length, max_kv=max_kv, splits=splits,
                   entered=Rows.empty(sequences, length, capacity, device),
                   plan=Plan.empty(sequences, length, capacity, device),
                   report=torch.zeros((sequences, report_width(length)), dtype=torch.int64, device=device))

    def rows_entered(self) -> int:
        """T, read from the device."""
        assert self.entered is not None
        return int(self.entered.start[-1])

    def rows_kept(self) -> int:
        """N, read from the device."""
        assert self.plan is not None
        return int(self.plan.start[-1])

    def rows_sampled(self) -> int:
        """R, read from the device."""
        assert self.plan is not None
        return int(self.plan.sampled_start[-1])
