"""What must hold for the Triton KV write, interpreted or compiled; run as a program it checks small shapes."""
import pytest
import torch
from lmdeploy_focus.kernels import reference_kv_fill as reference
from lmdeploy_focus.kernels.kv_fill import kv_fill
from torch import Tensor

# rows, key heads, D, page size
SMALL = [(1, 1, 64, 16), (17, 8, 128, 64), (5, 3, 24, 32), (33, 2, 16, 16)]
LARGE = [(1, 8, 128, 64), (8192, 8, 128, 64), (1000, 1, 64, 16), (777, 5, 128, 32), (64, 32, 128, 64)]


def make(shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Keys and values inside a packed projection, caches inside pools that hold NaN, distinct slots; every third
    row is written nowhere and holds NaN."""
    rows, heads, size, page_size = shape
    random = torch.Generator().manual_seed(sum(shape))
    packed = torch.randn(rows, 5 * heads, size, generator=random).to(dtype)
    pages = -(-rows // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=random)[:rows]
    page, offset = slots // page_size, slots % page_size
    page[::3] = -1
    packed[::3] = float('nan')
    key_pool = torch.full((pages, 3, page_size, heads, size), float('nan'), dtype=cache_dtype).to(device)
    value_pool = torch.full((pages, page_size, heads + 1, size), float('nan'), dtype=cache_dtype).to(device)
    packed, page, offset = packed.to(device), page.to(device), offset.to(device)
    return packed[:, 3 * heads:4 * heads], packed[:, 4 * heads:], key_pool[:, 1], value_pool[:, :, 1:], page, offset


def check_twin(shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    """The bits of the twin in every slot of the pools, those that nothing is written to included."""
    ours, twins = (make(shape, dtype, cache_dtype, device) for _ in range(2))
    kv_fill(*ours)
    reference.kv_fill(*twins)
    assert (~ours[2].isnan()).any() == (shape[0] > 1)
    for mine, expected in zip(ours[2:4], twins[2:4], strict=True):
        torch.testing.assert_close(mine._base, expected._base, rtol=0, atol=0, equal_nan=True)
    key, value, *rest, page, offset = make(shape, dtype, cache_dtype, device)
    kv_fill(key, value, *rest, page.int(), offset.int())
    torch.testing.assert_close(rest[0]._base, twins[2]._base, rtol=0, atol=0, equal_nan=True)
    kv_fill(key[:0], value[:0], *rest, page[:0], offset[:0])


def check_far_page(device: str) -> None:
    """A page whose offset in the cache does not fit in 32 bits; the pool takes 8 GiB and a little more."""
    stride = 2**31 + 16
    cache = torch.empty(2, stride, dtype=torch.bfloat16, device=device)[:, :16 * 2 * 64].view(2, 16, 2, 64)
    key, value = torch.randn(2, 1, 2, 64, dtype=torch.bfloat16, device=device)
    slot = torch.ones(1, dtype=torch.int64, device=device)
    kv_fill(key, value, cache[:, :8], cache[:, 8:], slot, slot)
    assert cache[1, 1].equal(key[0]) and cache[1, 9].equal(value[0])


def check_refusals(device: str) -> None:
    """Arguments that the kernel cannot take raise."""
    key, value, key_cache, value_cache, page, offset = good = make((4, 2, 16, 16), torch.float32, torch.float32, device)
    refused = [(key, value[:, :1], *good[2:]), (key[..., :8], value[..., :8], *good[2:]), (key, value, key_cache[0],
               value_cache[0], page, offset), (key, value, key_cache, value_cache[:-1], page, offset),
               (key, value, key_cache, value_cache.half(), page, offset), (*good[:4], page[1:], offset),
               (*good[:4], page, offset.float()), (*good[:4], page.repeat_interleave(2)[::2], offset),
               (key.mT.contiguous().mT, value, *good[2:]), (*good[:2], key_cache.mT.contiguous().mT, *good[3:])]
    for arguments in refused:
        with pytest.raises(ValueError, match='kv_fill'):
            kv_fill(*arguments)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, torch.float32, torch.float32, 'cpu')
        check_twin(shape, torch.bfloat16, torch.bfloat16, 'cpu')
    # into a narrower cache; the interpreter rounds to bfloat16 the wrong way
    check_twin(SMALL[1], torch.float32, torch.float16, 'cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
