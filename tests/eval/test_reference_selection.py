"""Importance, budget and selection of the reference decode against the tests' oracle, sequence by sequence."""
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.demo_models.reference_selection import budget, importance, select

from .. import oracle


@pytest.mark.parametrize('sequences', [1, 3])
@pytest.mark.parametrize('length', [4, 16, 32])
def test_importance(sequences, length):
    """Red when decoded positions or the block's neighbours, not the list's, take part in pooling or softmax."""
    torch.manual_seed(length + sequences)
    query, key = torch.randn(sequences, length, 4, 8), torch.randn(sequences, length, 2, 8)
    masked = torch.rand(sequences, length) < 0.5
    masked[0] = False
    masked[-1, :2] = True
    found = importance(query, key, masked)
    for row in range(sequences):
        chosen = masked[row]
        expected = oracle.importance(query[row, chosen], key[row, chosen], 8 ** -0.5) if chosen.any() else []
        torch.testing.assert_close(found[row, chosen], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert not found[row, ~chosen].any()


@given(st.integers(0, 32), st.integers(0, 32), st.integers(0, 12), st.sampled_from(['1', '1.1', '1.3', '1.5', '3.25']))
def test_budget(count, decoded, steps, alpha):
    """Red when the product is rounded in floating point: ceil(1.1 * 10) is 11."""
    masked = (torch.arange(32) < count)[None]
    found = budget(masked, torch.tensor([decoded]), torch.tensor([steps]), float(alpha))
    assert found.item() == oracle.budget(count, decoded, steps, Fraction(alpha))


@settings(max_examples=300)
@given(st.integers(0, 2 ** 32 - 1), st.integers(1, 40), st.integers(-1, 31), st.booleans())
def test_select(seed, allowed, progress, paper_rules):
    """Red when one of the three rules is dropped, widened or applied in another order."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(3, 32, generator=generator)
    masked = torch.rand(3, 32, generator=generator) < torch.rand(3, 1, generator=generator)
    kept = select(score, masked, torch.full((3,), progress), torch.full((3,), allowed), paper_rules)
    assert not (kept & ~masked).any()
    for row in range(3):
        positions = masked[row].nonzero()[:, 0].tolist()
        expected = oracle.select(score[row, positions].tolist(), positions, allowed, progress, paper_rules)
        assert kept[row, positions].tolist() == expected


def test_ties_go_to_the_smaller_position():
    """Red when equal scores are ranked by anything but position."""
    masked = torch.tensor([[False, True, True, True, True]])
    kept = select(torch.zeros(1, 5), masked, torch.tensor([4]), torch.tensor([2]), False)
    assert kept.tolist() == [[False, True, True, False, False]]
