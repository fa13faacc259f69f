"""Decisions from a recording in the place of the model's own, for the throughput study (`eval/throughput.py`) alone.

Random weights decode nothing sensible, so that study replays what a trained model decided. Serving never sets this.
"""
from typing import Protocol

from torch import Tensor

from ..kernels.layout import Plan, Rows


class Replay(Protocol):
    """What stands in for a step's importances and confidences.

    Both methods run inside the capture of a CUDA graph: tensor operations on the device, no synchronisation, and
    nothing that depends on values. S sequences, L block length, R rows that are sampled at most.
    """

    def importances(self, table: Tensor, entered: Rows, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Partial importances of the j-th masked token in layers 0 and 1.

        Args:
            table: [S, state_width(L)] int64, state before the step.
            entered: the step's rows.
            first, second: [S, Hkv, L] float32, the model's own.

        Returns:
            Two tensors of the same shape; the difference of their sums over heads is the delta.
        """

    def decisions(self, table: Tensor, plan: Plan, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and confidences of the sampled rows.

        Args:
            table: as above.
            plan: the step's kept rows; row r is position `sampled_position[r]` of sequence `sampled_sequence[r]`.
            tokens, scores: [R] int64 and [R] float32, the model's own.

        Returns:
            The same shapes; a score of 2.0 accepts a row whatever the threshold, and 0.0 leaves it to be accepted only
            where no row of its sequence has a higher one.
        """


_current: Replay | None = None


def use(replay: Replay | None) -> None:
    """Replay in every engine that this process builds from now on; None ends that."""
    global _current
    _current = replay


def current() -> Replay | None:
    """What :func:`use` has set; an engine reads it once, when it builds its step."""
    return _current
