"""Norm of queries and keys, RoPE and the write to the KV cache in one launch; twin: `reference.norm_rope_fill`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_fill import check_cache

__all__ = ['norm_rope_fill']

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEADS = 8


@triton.jit
def _normed(x, weight, dim, real, scale):
    """RMSNorm with the factor `scale` of each head, in float32 up to the one rounding at its end."""
    w = tl.load(weight + dim, mask=real, other=0.0).to(tl.float32)
    return (w * (x.to(tl.float32) * scale)).to(x.dtype).to(tl.float32)


@triton.jit
def _turned(straight, straight_table, crossed, crossed_table, SIGN: tl.constexpr, dtype: tl.constexpr):
    """straight * straight_table + SIGN * crossed * crossed_table; both products and the sum are rounded."""
    first = (straight * straight_table).to(dtype).to(tl.float32)
    second = (crossed * crossed_table).to(dtype).to(tl.float32)
    return (first + SIGN * second).to(dtype)


@triton.jit
def _table(table, dim, real, dtype: tl.constexpr):
    """A part of cos or sin, rounded to the dtype of the queries as LMDeploy's kernel does."""
    return tl.load(table + dim, mask=real, other=0.0).to(dtype).to(tl.float32)


@triton.jit
def norm_rope(source, weight, cos, sin, target, copy, eps, keep, keep_copy, SIZE: tl.constexpr, ROTARY: tl.constexpr,
               BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Norm and rotate the heads that begin at `source` [BLOCK_H, 1]; store them at `target` where `keep` and, unless
    that is None, at `copy` where `keep_copy`."""
    dtype: tl.constexpr = source.dtype.element_ty
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, BLOCK_D)[None, :]
    real = dim < HALF
    low = tl.load(source + dim, mask=keep_copy & real, other=0.0)
    high = tl.load(source + HALF + dim, mask=keep_copy & real, other=0.0)
    squares = tl.sum(low.to(tl.float32) * low.to(tl.float32), 1) + tl.sum(high.to(tl.float32) * high.to(tl.float32), 1)
    if BLOCK_R:
        rest_dim = ROTARY + tl.arange(0, BLOCK_R)[None, :]
        rest_real = rest_dim < SIZE
        rest = tl.load(source + rest_dim, mask=keep_copy & rest_real, other=0.0)
        squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    scale = tl.rsqrt(squares * (1.0 / SIZE) + eps)[:, None]
    low = _normed(low, weight, dim, real, scale)
    high = _normed(high, weight, HALF + dim, real, scale)
    y_low = _turned(low, _table(cos, dim, real, dtype), high, _table(sin, dim, real, dtype), -1.0, dtype)
    y_high = _turned(high, _table(cos, HALF + dim, real, dtype), low, _table(sin, HALF + dim, real, dtype), 1.0, dtype)
    tl.store(target + dim, y_low, mask=keep & real)
    tl.store(target + HALF + dim, y_high, mask=keep & real)
    if copy is not None:
        tl.store(copy + dim, y_low, mask=keep_copy & real)
        tl.store(copy + HALF + dim, y_high, mask=keep_copy & real)
    if BLOCK_R:
        rest = _normed(rest, weight, rest_dim, rest_real, scale).to(dtype)
        tl.store(target + rest_dim, rest, mask=keep & rest_real)
        if copy is not None:
            tl.store(copy + rest_dim, rest, mask=keep_copy & rest_real)


@triton.jit
def _norm_rope_fill_kernel(qkv, query_weight, key_weight, cos, sin, key_cache, value_cache, pages, offsets, query, key,
                           eps, stride_n, stride_cos, stride_sin, stride_kcp, stride_kcs, stride_kch, stride_vcp,
                           stride_vcs, stride_vch, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
                           ROTARY: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
                           BLOCK_V: tl.constexpr):
    """One program for a row and BLOCK_H heads, which are all queries, all keys or all values."""
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK_H)[:, None]
    qkv += row * stride_n
    cos += row * stride_cos
    sin += row * stride_sin
    if block < QUERY_BLOCKS:
        head = block * BLOCK_H + lane
        norm_rope(qkv + head * SIZE, query_weight, cos, sin, query + (row * HEADS + head) * SIZE, None, eps,
                   head < HEADS, head < HEADS, SIZE, ROTARY, BLOCK_D, BLOCK_R)
        return
    page, slot = tl.load(pages + row).to(tl.int64), tl.load(offsets + row).to(tl.int64)
    qkv += HEADS * SIZE
    if block < QUERY_BLOCKS + KV_BLOCKS:
        head = (block - QUERY_BLOCKS) * BLOCK_H + lane
        copy = None if key is None else key + (row * KV_HEADS + head) * SIZE
        key_cache += page * stride_kcp + slot * stride_kcs
        norm_rope(qkv + head * SIZE, key_weight, cos, sin, key_cache + head * stride_kch, copy, eps,
                   (head < KV_HEADS) & (page >= 0), head < KV_HEADS, SIZE, ROTARY, BLOCK_D, BLOCK_R)
        return
    head = (block - QUERY_BLOCKS - KV_BLOCKS) * BLOCK_H + lane
    dim = tl.arange(0, BLOCK_V)[None, :]
    real = (head < KV_HEADS) & (dim < SIZE) & (page >= 0)
    value_cache += page * stride_vcp + slot * stride_vcs
    value = tl.load(qkv + (KV_HEADS + head) * SIZE + dim, mask=real)
    tl.store(value_cache + head * stride_vch + dim, value, mask=real)


def check_tables(name: str, rows: int, size: int, cos: Tensor, sin: Tensor) -> None:
    """Refuse tables that are not [rows, rotary_dim], rotary_dim even and at most the head size, for the kernel `name`.

    Raises:
        ValueError: see there.
    """
    rotary = cos.size(-1)
    if cos.shape != (rows, rotary) or sin.shape != cos.shape or rotary % 2 or not 0 < rotary <= size:
        raise ValueError(f'cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: {name} takes an even number of values, from '
                         f'2 to {size}, for each of {rows} rows')


def _check(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor) -> None:
    rows, width = qkv.shape
    kv_heads, size = key_cache.shape[2:]
    if qkv.dtype not in _DTYPES or key_cache.dtype != qkv.dtype:
        raise ValueError(f'qkv of {qkv.dtype}, caches of {key_cache.dtype}: norm_rope_fill takes one data type, '
                         'float32, bfloat16 or float16')
    if width % size or width // size <= 2 * kv_heads:
        raise ValueError(f'qkv {tuple(qkv.shape)}, caches {tuple(key_cache.shape)}: norm_rope_fill takes rows of '
                         f'(H + 2 * {kv_heads}) * {size} values')
    if qkv.stride(1) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise ValueError(f'strides {qkv.stride()}, {cos.stride()} and {sin.stride()}: norm_rope_fill takes unit stride '
                         'in the last axis')
    for name, weight in (('query_weight', query_weight), ('key_weight', key_weight)):
        if weight.shape != (size,) or weight.stride(0) != 1 or weight.dtype != qkv.dtype:
            raise ValueError(f'{name} {tuple(weight.shape)} of {weight.dtype}: norm_rope_fill takes {size} contiguous '
                             f'values of {qkv.dtype}')
    check_tables('norm_rope_fill', rows, size, cos, sin)


def norm_rope_fill(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor,
                   value_cache: Tensor, pages: Tensor, offsets: Tensor, eps: float,
                   return_key: bool = False) -> tuple[Tensor, Tensor | None]:
    """RMSNorm and RoPE of the queries and keys of a packed projection; its keys and values go to the paged cache.

    Intermediate results are rounded to the dtype of `qkv` where stock LMDeploy rounds them. The heads are [H queries |
    Hkv keys | Hkv values]; the first rotary_dim values of a head are rotated by halves, the rest is only normed.

    Args:
        qkv: [N, (H + 2 * Hkv) * D] float32, bfloat16 or float16, unit stride in the row.
        query_weight, key_weight: [D], of the norms over a head.
        cos, sin: [N, rotary_dim], tables of each row, both halves written out; rotary_dim even, from 2 to D.
        key_cache, value_cache: [B, G, Hkv, D] in the dtype of `qkv`, unit stride in D, written in place.
        pages: [N] int64 or int32, page of each row; -1 for a row that is not cached: its query and key are computed.
        offsets: [N] int64 or int32, slot within the page. No two rows share a slot.
        eps: of the norms.
        return_key: return the keys too.

    Returns:
        The queries, [N, H, D], and the keys, [N, Hkv, D], or None; contiguous, in the dtype of `qkv`.

    Raises:
        ValueError: shapes, strides or data types that the kernel cannot take.
    """
    check_cache('norm_rope_fill', qkv.size(0), key_cache, value_cache, pages, offsets)
    _check(qkv, query_weight, key_weight, cos, sin, key_cache)
    rows, (kv_heads, size) = qkv.size(0), key_cache.shape[2:]
    heads = qkv.size(1) // size - 2 * kv_heads
    query = qkv.new_empty((rows, heads, size))
    key = qkv.new_empty((rows, kv_heads, size)) if return_key else None
    if not rows:
        return query, key
    rotary = cos.size(1)
    block_h, block_d = min(MAX_HEADS, triton.next_power_of_2(kv_heads)), triton.next_power_of_2(rotary // 2)
    blocks = triton.cdiv(heads, block_h) + 2 * triton.cdiv(kv_heads, block_h)
    # Four elements of each half a thread: a row of the tables then has the layout of the heads, and nothing goes
    # through shared memory. Products and sums are not contracted: LMDeploy rounds each product.
    _norm_rope_fill_kernel[(rows, blocks)](
        qkv, query_weight, key_weight, cos, sin, key_cache, value_cache, pages, offsets, query, key, eps, qkv.stride(0),
        cos.stride(0), sin.stride(0), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), HEADS=heads, KV_HEADS=kv_heads, SIZE=size,
        ROTARY=rotary, BLOCK_H=block_h, BLOCK_D=block_d,
        BLOCK_R=triton.next_power_of_2(size - rotary) if rotary < size else 0, BLOCK_V=triton.next_power_of_2(size),
        num_warps=max(1, min(8, block_h * block_d // 128)), enable_fp_fusion=False)
    return query, key
