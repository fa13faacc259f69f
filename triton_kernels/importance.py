"""Importance of the masked tokens on tensor cores; twin: `reference.importance` (FOCUS, eq. 3 and 4)."""
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ['importance', 'importance_partial']

# Query heads share a program until their rows fill one tile: two warpgroup instructions deep. Its scores, kept for
# three neighbours, fill the registers of four warps at 32 columns and of eight at 64. Exact float32 products unroll
# into scalar code: smaller tiles, and a slice of the head at a time.
_TILE_ROWS = 128
_TILE_ROWS_FLOAT32 = 32
_SLICE_FLOAT32 = 16


@triton.jit
def _keys(key, rows, dims, key_row):
    """Keys of `rows`, transposed, 0 where a row is -1."""
    return tl.trans(tl.load(key + rows[:, None] * key_row + dims[None, :], mask=rows[:, None] >= 0, other=0.0))


@triton.jit
def _pooled_scores(query_at, real, key, rows, left, right, key_row, M: tl.constexpr, N: tl.constexpr,
                   SIZE: tl.constexpr, SLICE: tl.constexpr):
    """The largest score among each key and its neighbours in the list, [M, N], -inf where a key is none.

    Registers cannot be shifted along an axis, so the neighbours are products with shifted keys: the same row and column
    give the same bits in each of them.
    """
    own = tl.zeros([M, N], tl.float32)
    lower = tl.zeros([M, N], tl.float32)
    upper = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, SIZE, SLICE, num_stages=1):
        dims = start + tl.arange(0, SLICE)
        queries = tl.load(query_at[:, None] + dims[None, :], mask=real[:, None], other=0.0)
        own = tl.dot(queries, _keys(key, rows, dims, key_row), own, input_precision='ieee')
        lower = tl.dot(queries, _keys(key, left, dims, key_row), lower, input_precision='ieee')
        upper = tl.dot(queries, _keys(key, right, dims, key_row), upper, input_precision='ieee')
    lower = tl.where(left[None, :] >= 0, lower, float('-inf'))
    upper = tl.where(right[None, :] >= 0, upper, float('-inf'))
    return tl.where(rows[None, :] >= 0, tl.maximum(own, tl.maximum(lower, upper)), float('-inf'))


@triton.jit
def _partial_kernel(query, key, candidates, partial, scale, query_row, query_head, key_row, key_head, candidates_row,
                    LENGTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, SLICE: tl.constexpr,
                    GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """One program a (sequence, key head): what its masked tokens receive from the heads of the group."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    out = partial + (sequence * tl.num_programs(1) + kv_head) * LENGTH + column
    own = candidates + sequence * candidates_row
    received = tl.zeros([BLOCK], tl.float32)
    if tl.load(own) < 0:
        tl.store(out, received, mask=column < LENGTH)
        return
    rows = tl.load(own + column, mask=column < LENGTH, other=-1)
    left = tl.load(own + column - 1, mask=(column > 0) & (column < LENGTH), other=-1)
    right = tl.load(own + column + 1, mask=column + 1 < LENGTH, other=-1)
    tile = tl.arange(0, CHUNK * BLOCK)
    place = tile % BLOCK
    query_rows = tl.load(own + place, mask=place < LENGTH, other=-1)
    for start in tl.range(0, GROUPS, CHUNK, num_stages=1):
        head = start + tile // BLOCK
        real = (query_rows >= 0) & (head < GROUPS)
        query_at = query + query_rows * query_row + (kv_head * GROUPS + head) * query_head
        scores = _pooled_scores(query_at, real, key + kv_head * key_head, rows, left, right, key_row, CHUNK * BLOCK,
                                BLOCK, SIZE, SLICE) * scale
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        received += tl.sum(tl.where(real[:, None], weights, 0.0), 0)
    tl.store(out, tl.where(rows >= 0, received, 0.0), mask=column < LENGTH)


@triton.jit
def _sum_kernel(partial, out, KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a sequence: the sum over key heads, in their order."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for kv_head in tl.static_range(KV_HEADS):
        at = (sequence * KV_HEADS + kv_head) * LENGTH + column
        total += tl.load(partial + at, mask=column < LENGTH, other=0.0)
    tl.store(out + sequence * LENGTH + column, total, mask=column < LENGTH)


def importance_partial(query: Tensor, key: Tensor, candidates: Tensor, scale: float,
                       out: Tensor | None = None) -> Tensor:
    """The importance by key head; its sum over the heads, in their order, is :func:`importance`.

    A sequence's values depend on its own rows alone: neither the batch nor its size changes a bit.

    Args:
        query: [T, H, D], key: [T, Hkv, D] float32, bfloat16 or float16, unit stride in D; D a power of two from 16.
        candidates: [S, L] int64, L at most 64, row of the j-th masked token of each sequence, -1 beyond the last.
        scale: factor of the scores; positive.
        out: [S, Hkv, L] float32, contiguous, to write to.

    Returns:
        [S, Hkv, L] float32, 0 beyond the last masked token.

    Raises:
        ValueError: shapes, strides or data types that the kernel cannot take.
    """
    sequences, length = candidates.shape
    _, heads, size = query.shape
    kv_heads = key.size(1)
    if not 1 <= length <= 64:
        raise ValueError(f'candidates.size(1)={length}: importance takes block lengths from 1 to 64')
    if candidates.dtype != torch.int64 or candidates.stride(1) != 1:
        raise ValueError(f'candidates of {candidates.dtype} with stride {candidates.stride(1)}: importance takes int64 '
                         'with unit stride')
    if size < 16 or size & (size - 1) or key.size(2) != size or heads % kv_heads:
        raise ValueError(f'query {tuple(query.shape)}, key {tuple(key.shape)}: importance takes one head size, a power '
                         'of two from 16, and a multiple of the key heads')
    if query.dtype != key.dtype or query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(f'query of {query.dtype}, key of {key.dtype}, strides {query.stride()} and {key.stride()}: '
                         'importance takes one data type and unit stride in the head')
    if not scale > 0:
        raise ValueError(f'scale={scale!r}: importance takes a positive factor')
    if out is None:
        out = torch.empty((sequences, kv_heads, length), dtype=torch.float32, device=query.device)
    elif out.shape != (sequences, kv_heads, length) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f'out {tuple(out.shape)} of {out.dtype}: importance writes contiguous float32 '
                         f'{(sequences, kv_heads, length)}')
    if sequences:
        groups = heads // kv_heads
        block = max(16, triton.next_power_of_2(length))
        exact = query.dtype == torch.float32
        tile = _TILE_ROWS_FLOAT32 if exact else _TILE_ROWS
        chunk = max(1, min(triton.next_power_of_2(groups), tile // block))
        _partial_kernel[(sequences, kv_heads)](
            query, key, candidates, out, scale, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            candidates.stride(0), LENGTH=length, BLOCK=block, SIZE=size, SLICE=_SLICE_FLOAT32 if exact else size,
            GROUPS=groups, CHUNK=chunk, num_warps=8 if block == 64 else 4)
    return out


def importance(query: Tensor, key: Tensor, candidates: Tensor, scale: float) -> Tensor:
    """How much attention each masked token receives from the masked tokens of its block (FOCUS, eq. 3 and 4).

    Arguments, data types and errors are those of :func:`importance_partial`; the decode step takes the partial sums
    and leaves adding them to `plan`.

    Returns:
        [S, L] float32, 0 beyond the last masked token.
    """
    partial = importance_partial(query, key, candidates, scale)
    sequences, kv_heads, length = partial.shape
    out = torch.empty((sequences, length), dtype=torch.float32, device=query.device)
    if sequences:
        _sum_kernel[(sequences,)](partial, out, KV_HEADS=kv_heads, LENGTH=length,
                                  BLOCK=triton.next_power_of_2(length), num_warps=1)
    return out
