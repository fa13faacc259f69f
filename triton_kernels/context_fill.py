"""Keys and values of a drafter's context, for all of its layers in one launch; twin: `reference_context_fill`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_rope_fill import MAX_HEADS, check_tables, norm_rope

__all__ = ['context_fill']

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _context_fill_kernel(projected, key_weight, cos, sin, key_cache, value_cache, pages, offsets, eps, stride_n,
                         stride_cos, stride_sin, stride_kcl, stride_kcp, stride_kcs, stride_kch, stride_vcl, stride_vcp,
                         stride_vcs, stride_vch, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr,
                         BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):
    """One program for a row, BLOCK_H heads, which are all keys or all values, and a layer."""
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row, block, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    page, slot = tl.load(pages + row).to(tl.int64), tl.load(offsets + row).to(tl.int64)
    lane = tl.arange(0, BLOCK_H)[:, None]
    projected += row * stride_n + layer * (2 * KV_HEADS * SIZE)
    if block < KV_BLOCKS:
        head = block * BLOCK_H + lane
        keep = (head < KV_HEADS) & (page >= 0)
        target = key_cache + layer * stride_kcl + page * stride_kcp + slot * stride_kcs + head * stride_kch
        norm_rope(projected + head * SIZE, key_weight + layer * SIZE, cos + row * stride_cos, sin + row * stride_sin,
                   target, None, eps, keep, keep, SIZE, ROTARY, BLOCK_D, BLOCK_R)
        return
    head = (block - KV_BLOCKS) * BLOCK_H + lane
    dim = tl.arange(0, BLOCK_V)[None, :]
    keep = (head < KV_HEADS) & (dim < SIZE) & (page >= 0)
    target = value_cache + layer * stride_vcl + page * stride_vcp + slot * stride_vcs + head * stride_vch
    tl.store(target + dim, tl.load(projected + (KV_HEADS + head) * SIZE + dim, mask=keep), mask=keep)


def _check(projected: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor,
           pages: Tensor, offsets: Tensor) -> None:
    rows = projected.size(0)
    layers, _, _, kv_heads, size = key_cache.shape
    if projected.dtype not in _DTYPES or not projected.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f'projected of {projected.dtype}, caches of {key_cache.dtype} and {value_cache.dtype}: '
                         'context_fill takes one data type, float32, bfloat16 or float16')
    if key_cache.shape != value_cache.shape or projected.size(1) != layers * 2 * kv_heads * size:
        raise ValueError(f'projected {tuple(projected.shape)}, caches {tuple(key_cache.shape)} and '
                         f'{tuple(value_cache.shape)}: context_fill takes rows of L * 2 * Hkv * D values')
    if not projected.stride(1) == key_cache.stride(4) == value_cache.stride(4) == cos.stride(1) == sin.stride(1) == 1:
        raise ValueError(f'strides {projected.stride()}, {key_cache.stride()}, {value_cache.stride()}, {cos.stride()} '
                         f'and {sin.stride()}: context_fill takes unit stride in the last axis')
    if key_weight.shape != (layers, size) or not key_weight.is_contiguous() or key_weight.dtype != projected.dtype:
        raise ValueError(f'key_weight {tuple(key_weight.shape)} of {key_weight.dtype}: context_fill takes '
                         f'{layers} x {size} contiguous values of {projected.dtype}')
    check_tables('context_fill', rows, size, cos, sin)
    for name, index in (('pages', pages), ('offsets', offsets)):
        if index.shape != (rows,) or index.dtype not in (torch.int32, torch.int64) or not index.is_contiguous():
            raise ValueError(f'{name} {tuple(index.shape)} of {index.dtype}: context_fill takes {rows} of int32 or '
                             'int64, contiguous')


def context_fill(projected: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor,
                 value_cache: Tensor, pages: Tensor, offsets: Tensor, eps: float) -> None:
    """RMSNorm and RoPE of the keys of all layers of a drafter; they and the values go to the layers' paged caches.

    The context of DFlash (arXiv 2602.06036, section 3) has no queries: one product makes the keys and values of every
    layer. Intermediate results are rounded as in `norm_rope_fill`.

    Args:
        projected: [T, L * 2 * Hkv * D] float32, bfloat16 or float16, unit stride in the row; of each layer the keys
            and then the values.
        key_weight: [L, D] contiguous, of the norms over a key head.
        cos, sin: [T, rotary_dim], tables of each row, both halves written out; rotary_dim even, from 2 to D.
        key_cache, value_cache: [L, B, G, Hkv, D] in the dtype of `projected`, unit stride in D, written in place.
        pages: [T] int64 or int32, page of each row; -1 for a row that is not cached.
        offsets: [T] int64 or int32, slot within the page. No two rows share a slot.
        eps: of the norms.

    Raises:
        ValueError: shapes, strides or data types that the kernel cannot take.
    """
    _check(projected, key_weight, cos, sin, key_cache, value_cache, pages, offsets)
    rows = projected.size(0)
    layers, _, _, kv_heads, size = key_cache.shape
    if not rows:
        return
    rotary = cos.size(1)
    block_h, block_d = min(MAX_HEADS, triton.next_power_of_2(kv_heads)), triton.next_power_of_2(rotary // 2)
    # products and sums are not contracted, and warps are as many as in `norm_rope_fill`, for the same reasons
    _context_fill_kernel[(rows, 2 * triton.cdiv(kv_heads, block_h), layers)](
        projected, key_weight, cos, sin, key_cache, value_cache, pages, offsets, eps, projected.stride(0),
        cos.stride(0), sin.stride(0), *key_cache.stride()[:4], *value_cache.stride()[:4], KV_HEADS=kv_heads, SIZE=size,
        ROTARY=rotary, BLOCK_H=block_h, BLOCK_D=block_d,
        BLOCK_R=triton.next_power_of_2(size - rotary) if rotary < size else 0, BLOCK_V=triton.next_power_of_2(size),
        num_warps=max(1, min(8, block_h * block_d // 128)), enable_fp_fusion=False)
