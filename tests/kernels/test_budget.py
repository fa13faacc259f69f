"""The budget K = min(masked, max(1, ceil(alpha * mean))), over the reals."""
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdeploy_focus.kernels import reference

from .. import oracle
from .select_cases import LENGTHS, SEQUENCES, examples


@st.composite
def statistics(draw):
    """Batches of (masked, decoded, steps) and an alpha in hundredths."""
    length = draw(st.sampled_from(LENGTHS))
    hundredths = draw(st.one_of(st.integers(100, 300), st.integers(100, 6400)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batches = []
    for sequences in SEQUENCES:
        steps = random.integers(0, length + 1, size=sequences)
        decoded = np.where(steps > 0, random.integers(steps, length + 1), 0)
        batches.append(torch.from_numpy(np.stack([random.integers(0, length + 1, size=sequences), decoded, steps])))
    return batches, Fraction(hundredths, 100)


@settings(max_examples=examples(6_000), deadline=None, derandomize=True)
@given(statistics())
def test_budget_is_the_oracles(case):
    """Red when: alpha multiplies before the mean is clamped, the ceiling becomes a rounding, nothing masked has a
    budget, or a step count of zero divides."""
    batches, alpha = case
    for masked, decoded, steps in batches:
        budgets = reference.budget(masked, decoded, steps, float(alpha))
        assert budgets.dtype == torch.int64
        expected = [oracle.budget(*row, alpha) for row in torch.stack([masked, decoded, steps], 1).tolist()]
        assert budgets.tolist() == expected


def test_ceiling_is_over_the_reals():
    """Every mean of a block of 64 and every alpha from 1.00 to 4.00 in hundredths, against integers.

    Red when: the product is rounded in fp32 or fp64 before the ceiling: 1.1 * 10 is 11, not 12.
    """
    decoded, steps = (table.flatten() for table in torch.meshgrid(torch.arange(1, 65), torch.arange(1, 65),
                                                                   indexing='ij'))
    decoded, steps = decoded[decoded >= steps], steps[decoded >= steps]
    masked = torch.full_like(decoded, 10**6)
    for hundredths in range(100, 401):
        exact = (hundredths * decoded + 100 * steps - 1) // (100 * steps)
        assert reference.budget(masked, decoded, steps, hundredths / 100).equal(exact), hundredths


def test_a_blocks_first_step():
    """No step has decoded anything yet: a mean of one token. Red when: an empty history counts as zero, or as L."""
    masked = torch.tensor([0, 1, 2, 32])
    zero = torch.zeros(4, dtype=torch.int64)
    assert reference.budget(masked, zero, zero, 1.5).tolist() == [0, 1, 2, 2]
    assert reference.budget(masked, zero, zero, 1.0).tolist() == [0, 1, 1, 1]
