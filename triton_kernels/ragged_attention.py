"""Attention of a ragged batch over the paged cache; twin: `reference.ragged_attention`.

The heads that share a key head become further rows: row i and head g of a group are packed row i * GROUP + g. A program
takes a tile of packed rows of one sequence, one key head and one split of the sequence's keys. Every split is a whole
number of key blocks counted from the sequence's own length, so the bits of a row depend on its sequence and the number
of splits, never on company.
"""
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ['ragged_attention']

# Two programs for each of the 132 multiprocessors of an H200 keep its memory busy: each holds two to three key blocks
# in flight. Fewer programs than FULL are split along the keys until there are about TARGET.
_TARGET_PROGRAMS = 264
_FULL_PROGRAMS = 192
_MAX_SPLITS = 32
# A split below this many keys costs more in its partial sums than it saves.
_MIN_SPLIT_KEYS = 64


@triton.jit
def _page(page_table, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each of the keys start ... start + BLOCK_N that lie before `end`, else 0."""
    if PAGE >= BLOCK_N:
        # a block begins on a multiple of BLOCK_N: all of it lies on one page
        return tl.load(page_table + start // PAGE, mask=start < end, other=0).to(tl.int64)
    else:
        key = start + tl.arange(0, BLOCK_N)
        return tl.load(page_table + key // PAGE, mask=key < end, other=0).to(tl.int64)


@triton.jit(do_not_specialize=['num_rows'])
def _attend_kernel(query, key_cache, value_cache, page_table, q_start, kv_len, position_ids, out, maxima, sums, scale,
                   num_rows, stride_qn, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
                   stride_table, TILES: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, DIRECT: tl.constexpr,
                   PRECISION: tl.constexpr):
    """Output of one (tile, key head), or with more than one split its unnormalised sum, maximum and sum of weights."""
    # The key heads of a sequence run side by side: in memory a token's heads are neighbours.
    kv_heads = tl.num_programs(1)
    work = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    kv_head = work % kv_heads
    sequence = (work // kv_heads) // TILES
    tile = (work // kv_heads) % TILES
    first = tl.load(q_start + sequence).to(tl.int64)
    packed_rows = (tl.load(q_start + sequence + 1).to(tl.int64) - first).to(tl.int32) * GROUP
    if tile * BLOCK_M >= packed_rows:
        return
    split, splits = tl.program_id(2), tl.num_programs(2)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = packed < packed_rows
    row = first + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    keys = tl.load(kv_len + sequence).to(tl.int32)
    if CAUSAL:
        limit = tl.minimum(tl.load(position_ids + row, mask=live, other=-1).to(tl.int32) + 1, keys)
        seen = tl.max(limit, 0)
    else:
        seen = keys
    per_split = tl.cdiv(tl.cdiv(keys, BLOCK_N), splits) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, seen)

    dims = tl.arange(0, SIZE)
    wanted = live & (begin < end)
    q = tl.load(query + row[:, None] * stride_qn + head[:, None] * stride_qh + dims[None, :], mask=wanted[:, None],
                other=0.0)
    page_table += sequence.to(tl.int64) * stride_table
    key_cache += kv_head.to(tl.int64) * stride_kh
    value_cache += kv_head.to(tl.int64) * stride_vh
    maximum = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, SIZE], tl.float32)
    # The page is carried from block to block: loaded where it is used, it would be pipelined like the keys and halve
    # the depth of their own pipeline.
    page = _page(page_table, begin, end, PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = key < end
        at = page * stride_kp + (key % PAGE) * stride_ks
        # hidden keys and values are never loaded: a weight of zero does not undo the NaN that a freed page may hold
        k = tl.load(key_cache + at[:, None] + dims[None, :], mask=visible[:, None], other=0.0)
        at = page * stride_vp + (key % PAGE) * stride_vs
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=visible[:, None], other=0.0)
        page = _page(page_table, start + BLOCK_N, end, PAGE, BLOCK_N)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAUSAL:
            scores = tl.where(key[None, :] < limit[:, None], scores, float('-inf'))
        scores = tl.where(visible[None, :], scores, float('-inf'))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        # a row that sees no key yet has the maximum -inf, and -inf - -inf is NaN
        base = tl.where(larger == float('-inf'), 0.0, larger * scale)
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(maximum * scale - base)
        total = total * shrink + tl.sum(weights, 1)
        maximum = larger
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    at = row * (kv_heads * GROUP) + head
    if DIRECT:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at[:, None] * SIZE + dims[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
    else:
        at += split * num_rows.to(tl.int64) * (kv_heads * GROUP)
        tl.store(maxima + at, maximum * scale, mask=live)
        tl.store(sums + at, total, mask=live)
        tl.store(out + at[:, None] * SIZE + dims[None, :], acc, mask=wanted[:, None])


@triton.jit(do_not_specialize=['num_rows', 'sequences'])
def _reduce_kernel(partial, maxima, sums, q_start, out, num_rows, sequences, splits, SIZE: tl.constexpr,
                   SPLITS: tl.constexpr):
    """One program a (row, head): the splits' sums, rescaled to the common maximum and added in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(q_start + sequences):
        return
    heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    real = split < splits
    at = (split * num_rows.to(tl.int64) + row) * heads + tl.program_id(1)
    maximum = tl.load(maxima + at, mask=real, other=float('-inf'))
    total = tl.load(sums + at, mask=real, other=0.0)
    dims = tl.arange(0, SIZE)
    # a split without keys has written no sum
    acc = tl.load(partial + at[:, None] * SIZE + dims[None, :], mask=(total > 0)[:, None], other=0.0)
    largest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - tl.where(largest == float('-inf'), 0.0, largest))
    total = tl.sum(total * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * heads + tl.program_id(1)) * SIZE + dims, result.to(out.dtype.element_ty))


def _tile(dtype: torch.dtype, packed: int, mean_packed: float) -> dict[str, int]:
    """Tile and launch options for at most `packed` packed rows a sequence, `mean_packed` on average."""
    if dtype == torch.float32:
        # exact products use no tensor cores: small tiles stay in registers
        return {'BLOCK_M': 16, 'BLOCK_N': 32, 'num_warps': 4, 'num_stages': 1}
    if packed <= 16:
        return {'BLOCK_M': 16, 'BLOCK_N': 64, 'num_warps': 4, 'num_stages': 3}
    if packed <= 64 or mean_packed <= 64:
        # one warpgroup instruction is 64 rows high; two programs of three stages fill a multiprocessor's shared memory
        return {'BLOCK_M': 64, 'BLOCK_N': 64, 'num_warps': 4, 'num_stages': 3}
    # with more rows than that on average a second warpgroup reads the same keys instead of a second program
    return {'BLOCK_M': 128, 'BLOCK_N': 64, 'num_warps': 8, 'num_stages': 3}


def _splits(programs: int, max_kv: int) -> int:
    """Splits along the keys: 1 where the programs fill the GPU, else as many as do so and leave each some keys."""
    if programs >= _FULL_PROGRAMS:
        return 1
    wanted = triton.next_power_of_2(-(-_TARGET_PROGRAMS // programs))
    return max(1, min(wanted, _MAX_SPLITS, triton.next_power_of_2(-(-max_kv // _MIN_SPLIT_KEYS))))


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, q_start: Tensor, kv_len: Tensor,
           max_q: int, max_kv: int, scale: float, causal: bool, position_ids: Tensor | None,
           splits: int | None) -> None:
    size, page_size, kv_heads = query.size(2), key_cache.size(1), key_cache.size(2)
    sequences = page_table.size(0)
    if size not in (16, 32, 64, 128):
        raise ValueError(f'query of head size {size}: ragged_attention takes 16, 32, 64 or 128')
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f'pages of {page_size} tokens: ragged_attention takes a power of two from 16')
    if key_cache.shape != value_cache.shape or key_cache.size(3) != size or query.size(1) % kv_heads:
        raise ValueError(f'query {tuple(query.shape)}, caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)}: '
                         'ragged_attention takes one head size and a multiple of the key heads')
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f'query of {query.dtype}, caches of {key_cache.dtype} and {value_cache.dtype}: '
                         'ragged_attention takes one data type')
    if not query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == page_table.stride(1) == 1:
        raise ValueError(f'strides {query.stride()}, {key_cache.stride()}, {value_cache.stride()} and '
                         f'{page_table.stride()}: ragged_attention takes unit stride in the last axis')
    if q_start.shape != (sequences + 1,) or kv_len.shape != (sequences,):
        raise ValueError(f'q_start {tuple(q_start.shape)}, kv_len {tuple(kv_len.shape)}: ragged_attention takes '
                         f'{sequences + 1} and {sequences} for {sequences} rows of page_table')
    if not 1 <= max_q <= 64:
        raise ValueError(f'max_q={max_q}: ragged_attention takes 1 to 64 rows a sequence')
    if not scale > 0:
        raise ValueError(f'scale={scale!r}: ragged_attention takes a positive factor')
    if max_kv < 0:
        raise ValueError(f'max_kv={max_kv}: ragged_attention takes a bound from 0')
    if causal and (position_ids is None or position_ids.shape != (query.size(0),)):
        given = None if position_ids is None else tuple(position_ids.shape)
        raise ValueError(f'position_ids {given}: causal ragged_attention takes one position for each of '
                         f'{query.size(0)} rows')
    if splits is not None and not 1 <= splits <= _MAX_SPLITS:
        raise ValueError(f'splits={splits}: ragged_attention takes 1 to {_MAX_SPLITS}')


def ragged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, q_start: Tensor,
                     kv_len: Tensor, max_q: int, max_kv: int, scale: float, causal: bool = False,
                     position_ids: Tensor | None = None, splits: int | None = None) -> Tensor:
    """Attention of a ragged batch over the paged cache: a row sees its sequence's keys [0, kv_len), or, if causal,
    [0, min(kv_len, its position + 1)).

    Args:
        query: [N, H, D] float32, bfloat16 or float16, unit stride in D; D is 16, 32, 64 or 128. The rows of a sequence
            are contiguous; rows from q_start[S] on belong to none and their output is left unwritten.
        key_cache, value_cache: [B, G, Hkv, D] in the dtype of the query, unit stride in D; G a power of two from 16.
            Slots that no row sees may hold anything.
        page_table: [S, P] integer, page of each G tokens of a sequence; unused columns may hold anything.
        q_start: [S + 1] integer, first row of each sequence; a sequence may have none.
        kv_len: [S] integer, visible keys; a row that sees none gets 0.
        max_q: bound of the rows of a sequence, at most 64. The grid depends on it, the result does not.
        max_kv: bound of kv_len; a loose one is fine.
        scale: factor of the scores; positive.
        causal: hide the keys right of a row's own position.
        position_ids: [N] integer, position of each row in its text; needed if causal.
        splits: into how many parts a sequence's keys are cut, 1 to 32; None takes a number by the sizes. A row's bits
            are the same in any company for a fixed number.

    Returns:
        [N, H, D] in the dtype of the query, contiguous; accumulated in float32.

    Raises:
        ValueError: shapes, strides, data types or bounds that the kernel cannot take.
    """
    _check(query, key_cache, value_cache, page_table, q_start, kv_len, max_q, max_kv, scale, causal, position_ids,
           splits)
    rows, heads, size = query.shape
    sequences, kv_heads = page_table.size(0), key_cache.size(2)
    out = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    if not rows or not sequences:
        return out
    group = heads // kv_heads
    # a batch padded to its bucket may hold more sequences than rows
    live = min(sequences, rows)
    mean_packed = rows * group / live
    tile = _tile(query.dtype, max_q * group, mean_packed)
    if splits is None:
        splits = _splits(live * kv_heads * math.ceil(mean_packed / tile['BLOCK_M']), max_kv)
    tiles = triton.cdiv(max_q * group, tile['BLOCK_M'])
    direct = splits == 1
    partial, maxima, sums = out, out, out
    if not direct:
        partial = torch.empty((splits, rows, heads, size), dtype=torch.float32, device=query.device)
        maxima, sums = torch.empty((2, splits, rows, heads), dtype=torch.float32, device=query.device)
    _attend_kernel[(sequences * tiles, kv_heads, splits)](
        query, key_cache, value_cache, page_table, q_start, kv_len, position_ids if causal else None, partial, maxima,
        sums, scale * math.log2(math.e), rows, query.stride(0), query.stride(1), key_cache.stride(0),
        key_cache.stride(1), key_cache.stride(2), value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
        page_table.stride(0), TILES=tiles, GROUP=group, SIZE=size, PAGE=key_cache.size(1), CAUSAL=causal, DIRECT=direct,
        PRECISION='ieee' if query.dtype == torch.float32 else 'tf32', **tile)
    if not direct:
        _reduce_kernel[(rows, heads)](partial, maxima, sums, q_start, out, rows, sequences, splits, SIZE=size,
                                      SPLITS=triton.next_power_of_2(splits), num_warps=1 if splits <= 4 else 4)
    return out
