"""Given numbers of accepted tokens in the place of the real ones, for the study `eval/dflash_throughput.py` alone.

Random weights accept nothing, so that study replays how many drafted tokens a trained drafter would get through.
Serving never sets this.
"""
from typing import Protocol

from torch import Tensor


class Replay(Protocol):
    """What stands in for a verification's outcome. S sequences, k drafted tokens."""

    def agreed(self, same: Tensor) -> Tensor:
        """Which drafted tokens count as what the target sampled; called once a verification, and must not wait for the
        device.

        Args:
            same: [S, k], not 0 for those that really are.

        Returns:
            [S, k] bool, in each row true up to some place and false from there on.
        """


_current: Replay | None = None


def use(replay: Replay | None) -> None:
    """Replay in every DFlash engine that this process builds from now on; None ends that."""
    global _current
    _current = replay


def current() -> Replay | None:
    """What :func:`use` has set; an engine reads it once, when it builds its agent."""
    return _current
