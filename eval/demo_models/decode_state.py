"""Where the sequences of a reference decode stand. Letters: S sequences, L block length."""
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockState:
    """Where every sequence that is still decoding stands before a step.

    Attributes:
        row: int64 [S], which prompt it answers.
        ids: int64 [S, L], the current block; MASK where masked.
        masked: bool [S, L].
        uncached: bool [S, L], positions that the delayed cache still processes.
        history: int64 [S], tokens before the block.
        progress: int64 [S], rightmost position that has been through all layers, -1 if none.
        decoded, steps: int64 [S], the block's budget statistics.
    """

    row: Tensor
    ids: Tensor
    masked: Tensor
    uncached: Tensor
    history: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor

    def take(self, sequences: Tensor) -> 'BlockState':
        """The sequences whose index is given."""
        return BlockState(**{field.name: getattr(self, field.name)[sequences] for field in fields(self)})


@dataclass(frozen=True)
class Forced:
    """Decisions to follow instead of one's own, each [S, L]: makes a step comparable with an engine's that chose
    otherwise in a near-tie. `kept` are the masked positions that survive eviction; `ids` are read where `unmasked` is
    True."""

    kept: Tensor | None = None
    unmasked: Tensor | None = None
    ids: Tensor | None = None


def last_position(rows: Tensor) -> Tensor:
    """Rightmost True of bool [S, L], -1 if there is none."""
    return torch.where(rows, torch.arange(rows.shape[1], device=rows.device), -1).amax(1)
