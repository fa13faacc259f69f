"""How many rows the next step is given room for, without asking the device.

A step's row counts are decided on the device. The host picks the buckets of a step from what earlier steps wanted; a
sequence for which there is no room waits for the next step. Which steps are looked at does not depend on timing: the
same batch gets the same buckets in every run.
"""
import math
from collections import deque
from dataclasses import dataclass

import torch

from ..kernels.layout import TURNS, Pace

# Deviation of a sequence's rows from their mean, in block lengths for those that enter and, where nothing is evicted,
# for all, else in rows.
_ENTER_DEVIATION, _KEEP_DEVIATION, _SAMPLE_DEVIATION = 0.4, 3.5, 2.0
# How many deviations of the sum a bucket reaches beyond the mean. Room costs time in every step; a lack of it delays a
# few sequences by one step, and one that is not kept has cost no more than its prefix.
_WIDE, _NARROW = 2.0, 0.3
# Up to so many rows room is free: a step reads weights for longer than it computes. Two sequences get all they want.
_FREE_ROWS, _SMALL = 192, 2
# Weight of the newest step in the mean.
_NEWEST = 0.25
# Kept and sampled rows of a sequence before any step has been seen, where steps evict.
_FIRST_KEPT, _FIRST_SAMPLED = 8, 5


@dataclass
class _Launched:
    """A step on its way: number of sequences, whether it evicts, and the event after it (None on a CPU)."""
    count: int
    evicting: bool
    done: torch.cuda.Event | None


class Pacer:
    """Predicts rows that want to enter, to be kept and to be sampled.

    Args:
        pace: whose totals the steps write.
        length: L.
        largest: most rows of a step.
        evicting: whether steps evict, where nothing else is said of one.
    """

    def __init__(self, pace: Pace, length: int, largest: int, evicting: bool) -> None:
        self.pace, self.length, self.largest, self.evicting = pace, length, largest, evicting
        self.turn = 0
        self.deferred = 0
        # of steps that evict, and of those that do not
        self._means = {mode: [float(length), *(min(rows, length) if mode else length
                                               for rows in (_FIRST_KEPT, _FIRST_SAMPLED))] for mode in (True, False)}
        self._launched: deque[_Launched] = deque()
        self._joined: deque[int] = deque([0], maxlen=TURNS - 1)

    def join(self, sequences: int) -> None:
        """Sequences that take part from the next step on; all of a new block enters."""
        self._joined[-1] += sequences

    def predict(self, count: int, evicting: bool | None = None) -> tuple[int, int, int]:
        """Rows to give room for in a step of `count` sequences: entering, kept, sampled."""
        self._learn()
        evicting = self.evicting if evicting is None else evicting
        everything = min(2 * count * self.length, self.largest)
        if count <= _SMALL:
            return everything, everything, min(count * self.length, self.largest)
        enters, keeps, draws = (mean * count for mean in self._means[evicting])
        root, block = math.sqrt(count), _ENTER_DEVIATION * self.length
        fresh = self.length * sum(self._joined)
        enters += fresh + block * root
        if evicting:
            wide = min(keeps + _WIDE * _KEEP_DEVIATION * root, _FREE_ROWS)
            keeps = max(wide, keeps + _NARROW * _KEEP_DEVIATION * root)
            draws += _SAMPLE_DEVIATION * root
        else:  # all that enter are kept
            keeps, draws = enters, draws + fresh + block * root
        enter, keep, draw = (max(2 * self.length, min(math.ceil(rows), everything)) for rows in (enters, keeps, draws))
        return enter, keep, min(draw, keep)

    def launch(self, count: int, done: torch.cuda.Event | None, evicting: bool | None = None) -> None:
        """A step of `count` sequences is on its way."""
        self._launched.append(_Launched(count, self.evicting if evicting is None else evicting, done))
        self._joined.append(0)
        self.turn += 1

    def _learn(self) -> None:
        """Take in the step before the last, which is over: LMDeploy sends at most one step ahead."""
        while len(self._launched) > 1:
            launched = self._launched.popleft()
            if launched.done is not None:
                launched.done.synchronize()
            totals = self.pace.totals[(self.turn - len(self._launched) - 1) % TURNS].tolist()
            self.deferred += totals[3]
            if launched.count == 0:
                continue
            seen = [total / launched.count for total in totals[:3]]
            # what a sequence that waits would have kept is not known
            means = self._means[launched.evicting]
            if totals[3]:
                seen = [max(pair) for pair in zip(seen, means, strict=True)]
            means[:] = [(1 - _NEWEST) * mean + _NEWEST * new for mean, new in zip(means, seen, strict=True)]
