"""Policy: whether a step evicts or lets every row stay (option focus_policy)."""
import math
from dataclasses import dataclass

from torch import Tensor

# Confidence from which on a step that keeps everything decides a token, unless the option asks for more: that of dense
# decoding in the paper's comparisons. A lower one is right only where unlikely tokens do not compete (FOCUS, 4.2).
DENSE_THRESHOLD = 0.9
# Tokens that a step with everything decides at that threshold for each of one that evicts: the demo model's, 2.27 and
# 2.15 a step (eval/demo_models/results.json).
GAIN = 1.05
# A budget factor with which every masked token of the longest block fits.
EVERYTHING = 64.0


@dataclass(frozen=True)
class Mode:
    """What a step does, and what its sequences decide by.

    evicting: whether rows may go.
    alpha: of all its sequences; None is each one's own.
    threshold: each sequence's own where that is higher, else this.
    """
    evicting: bool
    alpha: float | None
    threshold: float


# Dense steps that 'auto' puts between evicting ones.
_DENSE = Mode(False, EVERYTHING, DENSE_THRESHOLD)


class Policy:
    """Chooses the mode of each step, by what steps of so many rows cost.

    'always' evicts, 'never' leaves the delayed cache alone. 'auto' lets every row stay where that costs no more time
    than the tokens it brings are worth: at one or two sequences, where a step takes as long as reading the weights.
    Without measured costs (a CPU, `eager_mode`), and with a fixed budget, it always evicts.

    Args:
        option: 'auto', 'always' or 'never'.
        fixed: whether the budget is a fixed number.
    """

    def __init__(self, option: str, fixed: bool) -> None:
        if option not in ('auto', 'always', 'never'):
            raise ValueError(f'focus_policy={option!r} is not one of auto, always, never')
        self.first = Mode(option != 'never', None, 0.0)
        self.adaptive = option == 'auto' and not fixed

    def choose(self, evicting_ms: float, dense_ms: float) -> Mode:
        """The mode of a step that would take so long in either."""
        pays = self.adaptive and math.isfinite(dense_ms) and dense_ms <= GAIN * evicting_ms
        return _DENSE if pays else self.first


class Costs:
    """Milliseconds of a step's parts (prefix, suffix, head) by rows, as measured at warm-up.

    Args:
        buckets: numbers of rows, ascending.
        table: [3, len(buckets)] float32 milliseconds.
    """

    def __init__(self, buckets: list[int], table: Tensor) -> None:
        self._parts = [dict(zip(buckets, row, strict=True)) for row in table.tolist()]

    def of(self, rows: tuple[int, int, int]) -> float:
        """Of a step with so many rows in each part; infinity where one of them was not measured."""
        return sum(part.get(number, math.inf) for part, number in zip(self._parts, rows, strict=True))
