"""Random batches for the tests of budget and selection.

One example of hypothesis is three batches of 1, 3 and 17 sequences, so that it counts as 21 cases and one call of the
kernel decides many of them.
"""
from dataclasses import dataclass, fields

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

LENGTHS = (4, 8, 16, 32, 64)
SEQUENCES = (1, 3, 17)
CASES_PER_EXAMPLE = sum(SEQUENCES)


def examples(cases: int) -> int:
    """Examples that make up at least so many cases."""
    return -(-cases // CASES_PER_EXAMPLE)


@dataclass(frozen=True)
class Batch:
    """The arguments of `reference.select`."""
    delta: Tensor
    positions: Tensor
    budgets: Tensor
    progress: Tensor

    def __getitem__(self, index: object) -> 'Batch':
        """The sequences `index`."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def sequences(self) -> list[tuple[list[float], list[int], int, int]]:
        """Deltas, positions, budget and progress of each sequence, without padding."""
        counts = (self.positions >= 0).sum(1).tolist()
        return [(delta[:count], positions[:count], budget, progress)
                for delta, positions, budget, progress, count in zip(
                    self.delta.tolist(), self.positions.tolist(), self.budgets.tolist(), self.progress.tolist(), counts,
                    strict=True)]


def deltas(random: np.random.Generator, count: int) -> np.ndarray:
    """[count] float32: wide apart, all equal, many ties, or halves exactly one deviation from the mean.

    All but the first kind are multiples of 1/64, at most 64 in size. Whether delta >= mean + deviation is then either
    an exact tie or decided by far more than the rounding of float64: with integers m = 64 delta of n tokens the two
    sides differ by at least 1 / (n m - sum + root) > 1e-7 of their size. An exact tie is also a tie in float64 as long
    as the mean is a binary fraction; the few others, where the right answer would hang on a last bit, are moved apart.
    """
    kind = random.integers(4)
    if kind == 0:
        return random.normal(size=count).astype(np.float32)
    if kind == 1:
        whole = np.full(count, random.integers(-4000, 4000))
    elif kind == 2:
        whole = random.integers(0, random.integers(2, 5), size=count) * random.integers(1, 900)
    else:
        whole = random.permutation(np.arange(count) % 2) * random.integers(1, 900) - random.integers(0, 900)
    whole = whole.astype(np.int64)
    while _hangs_on_rounding(whole):
        whole[0] += 1
    return (whole / 64).astype(np.float32)


def _hangs_on_rounding(whole: np.ndarray) -> bool:
    """Whether a value is exactly one deviation from a mean that is no binary fraction."""
    count, total = len(whole), whole.sum()
    odd = max(1, count // (count & -count) if count else 1)
    above = count * whole - total
    return bool(total % odd and ((above >= 0) & (above**2 == count * (whole**2).sum() - total**2)).any())


def make_batch(seed: int, sequences: int, length: int) -> Batch:
    """A batch in which no, one, some or all tokens of a block are masked."""
    random = np.random.default_rng(seed)
    delta = np.zeros((sequences, length), np.float32)
    positions = np.full((sequences, length), -1)
    budgets = np.zeros(sequences, np.int64)
    for s in range(sequences):
        count = int(random.choice([0, 1, length, random.integers(length + 1), random.integers(length + 1)]))
        positions[s, :count] = np.sort(random.permutation(length)[:count])
        delta[s, :count] = deltas(random, count)
        budgets[s] = min(count, random.choice([1, 2, random.integers(1, length + 1)]))
    return Batch(torch.from_numpy(delta), torch.from_numpy(positions), torch.from_numpy(budgets),
                 torch.from_numpy(random.integers(-1, length, size=sequences)))


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Three batches of one block length, 21 cases."""
    length = draw(st.sampled_from(LENGTHS))
    seed = draw(st.integers(0, 2**32 - 1))
    return [make_batch(seed + sequences, sequences, length) for sequences in SEQUENCES]
