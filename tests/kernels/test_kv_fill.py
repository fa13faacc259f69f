"""Writing keys and values of scattered rows into the paged cache."""
import pytest
import torch
from lmdeploy_focus.kernels import reference_kv_fill as reference


@pytest.mark.parametrize('cache_dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('page_size', [16, 64])
@pytest.mark.parametrize('rows', [0, 1, 3, 17, 64])
def test_rows_land_in_their_slots_and_nowhere_else(rows, page_size, cache_dtype):
    """Red when: page and offset are swapped, a row goes to its neighbour's slot, keys and values change places, or a
    slot that is no row's is touched (all hold NaN)."""
    random = torch.Generator().manual_seed(rows + page_size)
    slots = torch.randperm(5 * page_size, generator=random)[:rows]
    key, value = torch.randn(2, rows, 2, 8, generator=random)
    key_cache, value_cache = torch.full((2, 5, page_size, 2, 8), float('nan'), dtype=cache_dtype)
    reference.kv_fill(key, value, key_cache, value_cache, slots // page_size, slots % page_size)
    for cache, written in ((key_cache, key), (value_cache, value)):
        flat = cache.flatten(0, 1)
        expected = torch.full_like(flat, float('nan'))
        for row, slot in enumerate(slots.tolist()):
            expected[slot] = written[row].to(cache_dtype)
        assert flat.isnan().equal(expected.isnan())
        assert flat.nan_to_num(nan=0).equal(expected.nan_to_num(nan=0))
