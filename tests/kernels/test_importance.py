"""Importance: against float64, its sum, and bits that do not depend on company."""
import pytest
import torch
from lmdeploy_focus.kernels import reference
from torch import Tensor

from .. import oracle

HEADS = 8
SHAPES = [  # S, L, query heads of a key head, D
    (1, 4, 1, 32), (1, 16, 8, 64), (1, 32, 4, 128), (1, 64, 2, 32), (3, 4, 8, 128), (3, 16, 2, 32), (3, 32, 1, 64),
    (3, 64, 4, 64), (17, 4, 4, 32), (17, 16, 1, 128), (17, 32, 2, 64), (17, 64, 8, 32)]
EVERY_SHAPE = pytest.mark.parametrize('sequences,length,group,size', SHAPES)


def make(sequences: int, length: int, group: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and candidates; 0, 1, L and other numbers of masked tokens, between rows that are not masked."""
    random = torch.Generator().manual_seed(sequences * 1000 + length + group + size)
    masked = [length, 1, 0, *torch.randint(0, length + 1, (sequences,), generator=random).tolist()][:sequences]
    rows = sequences * length
    query = torch.randn(rows, HEADS, size, generator=random).to(dtype)
    key = torch.randn(rows, HEADS // group, size, generator=random).to(dtype)
    candidates = torch.full((sequences, length), -1)
    for s, count in enumerate(masked):
        place = torch.randperm(length, generator=random)[:count].sort().values
        candidates[s, :count] = s * length + place
    return query, key, candidates


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@EVERY_SHAPE
def test_importance_is_the_oracles(sequences, length, group, size, dtype):
    """Red when: pooling looks at block positions instead of the list of masked tokens, sees beyond the list's ends or
    comes after the softmax, a query head reads another group's key, an unmasked token takes part, or sums are bf16."""
    query, key, candidates = make(sequences, length, group, size, dtype)
    result = reference.importance(query, key, candidates, size**-0.5)
    assert result.dtype == torch.float32 and result.shape == (sequences, length)
    for values, rows in zip(result, candidates, strict=True):
        rows = rows[rows >= 0]
        expected = torch.tensor(oracle.importance(query[rows], key[rows], size**-0.5), dtype=torch.float32)
        torch.testing.assert_close(values[:len(rows)], expected, rtol=1e-5, atol=1e-5)
        assert not values[len(rows):].any()


@EVERY_SHAPE
def test_a_sequence_gives_one_unit_a_query_and_head(sequences, length, group, size):
    """Red when: a padded column takes part in the softmax or a padded query in the sum."""
    query, key, candidates = make(sequences, length, group, size, torch.float32)
    total = reference.importance(query, key, candidates, size**-0.5).sum(1)
    torch.testing.assert_close(total, (candidates >= 0).sum(1) * float(HEADS), rtol=1e-5, atol=0)


@EVERY_SHAPE
def test_bits_are_the_same_in_any_company(sequences, length, group, size):
    """The same q and k bits, alone and as one of 17 with ragged counts.

    Red when: the order of a sum depends on the batch, as with float atomics or a matrix product that picks its path by
    the number of sequences.
    """
    query, key, candidates = make(17, length, group, size, torch.float32)
    together = reference.importance(query, key, candidates, size**-0.5)
    for s in range(17):
        block = slice(s * length, (s + 1) * length)
        own = candidates[s:s + 1] - torch.where(candidates[s:s + 1] >= 0, s * length, 0)
        alone = reference.importance(query[block].clone(), key[block].clone(), own, size**-0.5)
        assert alone[0].equal(together[s]), s
    backwards = reference.importance(query, key, candidates.flip(0), size**-0.5)
    assert backwards.flip(0).equal(together)


def test_another_sequences_nan_stays_there():
    """Red when: padded columns read a real row and let its NaN through (they point at row 0)."""
    query, key, candidates = make(3, 16, 2, 32, torch.float32)
    clean = reference.importance(query, key, candidates, 1.0)
    query[:16] = key[:16] = float('nan')
    assert reference.importance(query, key, candidates, 1.0)[1:].equal(clean[1:])


def test_large_scores_do_not_overflow():
    """Red when: the softmax does not subtract the maximum."""
    query, key, candidates = make(3, 16, 2, 32, torch.float32)
    result = reference.importance(query * 1e3, key * 1e3, candidates, 1.0)
    torch.testing.assert_close(result.sum(1), (candidates >= 0).sum(1) * float(HEADS))
