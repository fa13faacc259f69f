"""Writing the keys and values of scattered rows into the paged cache; twin: `reference_kv_fill.kv_fill`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ['kv_fill']

_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _fill_kernel(key, value, key_cache, value_cache, pages, offsets, stride_kn, stride_kh, stride_vn, stride_vh,
                 stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, HEADS: tl.constexpr,
                 SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program a row: its keys and values of all heads."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + row).to(tl.int64)
    if page < 0:
        return
    slot = tl.load(offsets + row).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    real = (head < HEADS) & (dim < SIZE)
    k = tl.load(key + row * stride_kn + head * stride_kh + dim, mask=real)
    v = tl.load(value + row * stride_vn + head * stride_vh + dim, mask=real)
    key_cache += page * stride_kcp + slot * stride_kcs
    value_cache += page * stride_vcp + slot * stride_vcs
    tl.store(key_cache + head * stride_kch + dim, k.to(key_cache.dtype.element_ty), mask=real)
    tl.store(value_cache + head * stride_vch + dim, v.to(value_cache.dtype.element_ty), mask=real)


def check_cache(name: str, rows: int, key_cache: Tensor, value_cache: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Refuse a cache or slots that the kernel called `name` cannot write `rows` rows to.

    Raises:
        ValueError: shapes, strides or data types.
    """
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(f'caches {tuple(key_cache.shape)} of {key_cache.dtype} and {tuple(value_cache.shape)} of '
                         f'{value_cache.dtype}: {name} takes two of one shape [B, G, Hkv, D] and data type')
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(f'cache strides {key_cache.stride()} and {value_cache.stride()}: {name} takes unit stride in '
                         'the last axis')
    if pages.shape != (rows,) or offsets.shape != (rows,) or pages.stride(0) != 1 or offsets.stride(0) != 1:
        raise ValueError(f'pages {tuple(pages.shape)}, offsets {tuple(offsets.shape)}: {name} takes one of each, '
                         f'contiguous, for {rows} rows')
    if pages.dtype not in _INTEGERS or offsets.dtype not in _INTEGERS:
        raise ValueError(f'pages of {pages.dtype}, offsets of {offsets.dtype}: {name} takes int32 or int64')


def kv_fill(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write the keys and values of scattered rows into the paged cache, in place.

    Args:
        key, value: [N, Hkv, D] float32, bfloat16 or float16, unit stride in D; rounded to the dtype of the caches.
        key_cache, value_cache: [B, G, Hkv, D], unit stride in D.
        pages: [N] int64 or int32, page of each row; -1 for a row that is written nowhere.
        offsets: [N] int64 or int32, slot within the page. No two rows share a slot.

    Raises:
        ValueError: shapes, strides or data types that the kernel cannot take.
    """
    rows, heads, size = key.shape
    check_cache('kv_fill', rows, key_cache, value_cache, pages, offsets)
    if value.shape != key.shape or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(f'key {tuple(key.shape)}, value {tuple(value.shape)}, caches {tuple(key_cache.shape)}: '
                         'kv_fill takes the heads and head size of the caches')
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(f'strides {key.stride()} and {value.stride()}: kv_fill takes unit stride in the last axis')
    if not rows:
        return
    block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(size)
    # eight elements, 16 bytes of a 16-bit type, a thread
    warps = max(1, min(8, block_h * block_d // 256))
    _fill_kernel[(rows,)](key, value, key_cache, value_cache, pages, offsets, key.stride(0), key.stride(1),
                          value.stride(0), value.stride(1), key_cache.stride(0), key_cache.stride(1),
                          key_cache.stride(2), value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
                          HEADS=heads, SIZE=size, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=warps)
