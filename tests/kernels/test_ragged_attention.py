"""Attention of ragged rows over the paged cache, against dense float64 attention of one sequence at a time."""
import pytest
import torch
from lmdeploy_focus.kernels import reference

from .. import oracle
from .paged import make_paged

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# the last key of a page, none, and one more; then longer texts, so that sequences end on different pages
EDGES = (-1, 0, 1, 5)


def ragged(sequences: int, most: int, random: torch.Generator) -> tuple[list[int], torch.Tensor]:
    """Rows of each sequence, 1 to `most`, and q_start."""
    rows = [most, 1, *torch.randint(1, most + 1, (sequences,), generator=random).tolist()][:sequences]
    return rows, torch.tensor([0, *rows]).cumsum(0)


@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('page_size', [16, 64])
@pytest.mark.parametrize('sequences,length,group,size', [(1, 4, 1, 32), (1, 32, 8, 128), (3, 16, 4, 64), (3, 64, 2, 32),
                                                         (17, 4, 8, 64), (17, 32, 1, 32)])
def test_attention_is_dense_attention(sequences, length, group, size, page_size, dtype):
    """Red when: a row sees a key at or beyond kv_len, another sequence's rows or pages, or a stale slot (those hold
    NaN), a page's order is lost, heads of a group are mixed up, or sums are not float32."""
    random = torch.Generator().manual_seed(length * size + sequences)
    rows, q_start = ragged(sequences, length, random)
    lengths = [page_size * (1 + s % 3) + EDGES[s % 4] for s in range(sequences)]
    heads, kv_heads = 8, 8 // group
    paged = make_paged(lengths, page_size, kv_heads, size, dtype, seed=sequences)
    query = torch.randn(sum(rows), heads, size, generator=random).to(dtype)
    result = reference.ragged_attention(query, paged.key_cache, paged.value_cache, paged.page_table, q_start,
                                        torch.tensor(lengths), length, max(lengths), size**-0.5)
    assert result.dtype == dtype and result.shape == query.shape
    for s in range(sequences):
        own = slice(int(q_start[s]), int(q_start[s + 1]))
        expected = oracle.attention(query[own], paged.keys[s], paged.values[s], size**-0.5)
        torch.testing.assert_close(result[own].double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize('page_size', [16, 64])
@pytest.mark.parametrize('edge', [-1, 0, 1])
def test_kv_len_hides_real_keys(page_size, edge):
    """Keys that exist and lie beyond kv_len are as if they were not there.

    Red when: kv_len is off by one or taken for the whole batch.
    """
    seen = [page_size + edge, 2 * page_size + edge, 1]
    paged = make_paged([3 * page_size] * 3, page_size, 2, 32, torch.float32, seed=7)
    query = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(1))
    result = reference.ragged_attention(query, paged.key_cache, paged.value_cache, paged.page_table,
                                        torch.tensor([0, 1, 4, 6]), torch.tensor(seen), 16, max(seen), 32**-0.5)
    for own, keys, values, length in zip((slice(0, 1), slice(1, 4), slice(4, 6)), paged.keys, paged.values, seen,
                                         strict=True):
        expected = oracle.attention(query[own], keys[:length], values[:length], 32**-0.5)
        torch.testing.assert_close(result[own].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('poison', [float('nan'), float('inf'), 1e30], ids=str)
def test_stale_slots_do_not_matter(poison):
    """What a freed page still holds, a number or not, changes no bit of another sequence's output.

    Red when: hidden values are multiplied by a weight of zero: zero times NaN is NaN.
    """
    arguments = {'lengths': [20, 64], 'page_size': 16, 'heads': 2, 'size': 32, 'dtype': torch.float32, 'seed': 3}
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    outs = []
    for paged in (make_paged(**arguments, poison=0.0), make_paged(**arguments, poison=poison)):
        outs.append(reference.ragged_attention(query, paged.key_cache, paged.value_cache, paged.page_table,
                                               torch.tensor([0, 2, 3]), torch.tensor([20, 64]), 8, 64, 0.2))
    assert outs[0].equal(outs[1])


@pytest.mark.parametrize('bound', [0, 7, 64])
def test_max_kv_is_only_a_bound(bound):
    """Red when: a larger max_kv (the batch's longest text) changes what a row sees."""
    paged = make_paged([20, 64], 16, 2, 32, torch.float32, seed=3)
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    arguments = (query, paged.key_cache, paged.value_cache, paged.page_table, torch.tensor([0, 2, 3]),
                 torch.tensor([20, 40]), 8)
    tight = reference.ragged_attention(*arguments, 40, 0.2)
    torch.testing.assert_close(reference.ragged_attention(*arguments, 40 + bound, 0.2), tight, rtol=1e-6, atol=1e-6)
