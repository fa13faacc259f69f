"""Attention of a ragged batch over the paged cache; twin: `reference_ragged_attention`.

The heads that share a key head become further rows: row i and head g of a group are packed row i * GROUP + g. An item
of work is a tile of packed rows of one sequence, one key head and one split of the keys that the tile sees. The grid is
a fixed number of programs, which share out the items that there are: a launch that a CUDA graph holds costs what its
rows cost, whatever the graph has room for. Whether keys are split is decided by the kernels themselves, from the number
of tiles that `attention_work` has left on the device.

Every split is a whole number of key blocks counted from the tile's own keys, and the splits are added in a fixed order,
so the bits of a row depend on its sequence and the number of splits, never on company.
"""
import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference_attention_work import AttentionWork, most_tiles

__all__ = ['ragged_attention']

_MAX_SPLITS = 32
# A split below this many keys costs more in its partial sums than it saves.
_MIN_SPLIT_KEYS = 64
# Two programs for each multiprocessor keep the memory of an H200 busy: each holds two to three key blocks in flight.
_PROGRAMS_PER_PROCESSOR = 2
_REDUCE_PROGRAMS_PER_PROCESSOR = 4
# Items that fill eight of eleven programs are not split.
_FULL_SHARE = 8, 11
_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _number_of_splits(items, programs, full, most, FORCED: tl.constexpr):
    """1 where the items fill the GPU, else the power of two that does; at most `most`, or always that number."""
    if FORCED:
        splits = most
    else:
        splits = 1
        # up to 32, the largest number
        for _ in tl.static_range(5):
            splits = tl.where(splits * items < programs, splits * 2, splits)
        splits = tl.where(items < full, tl.minimum(splits, most), 1)
    return splits


@triton.jit
def _page(page_table, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each of the keys start ... start + BLOCK_N that lie before `end`, else 0."""
    if PAGE >= BLOCK_N:
        # a block begins on a multiple of BLOCK_N: all of it lies on one page
        return tl.load(page_table + start // PAGE, mask=start < end, other=0).to(tl.int64)
    else:
        key = start + tl.arange(0, BLOCK_N)
        return tl.load(page_table + key // PAGE, mask=key < end, other=0).to(tl.int64)


@triton.jit(do_not_specialize=['programs', 'full', 'most_splits'])
def _attend_kernel(query, key_cache, value_cache, page_table, visible, hidden, tiles, count, out, partial, maxima, sums,
                   scale, programs, full, most_splits, stride_qn, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp,
                   stride_vs, stride_vh, stride_table, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
                   PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORCED: tl.constexpr,
                   PRECISION: tl.constexpr):
    """Every program takes each so many-th item: its output, or with more than one split its unnormalised sum, maximum
    and sum of weights."""
    heads: tl.constexpr = KV_HEADS * GROUP
    items = tl.load(count) * KV_HEADS
    splits = _number_of_splits(items, programs, full, most_splits, FORCED)
    dims = tl.arange(0, SIZE)
    for item in range(tl.program_id(0), items * splits, tl.num_programs(0)):
        # The key heads of a tile run side by side: in memory a token's heads are neighbours.
        kv_head = item % KV_HEADS
        split = (item // KV_HEADS) % splits
        tile = item // KV_HEADS // splits
        sequence = tl.load(tiles + tile * 4).to(tl.int64)
        first = tl.load(tiles + tile * 4 + 1).to(tl.int64)
        packed = tl.load(tiles + tile * 4 + 2) + tl.arange(0, BLOCK_M)
        live = packed < tl.load(tiles + tile * 4 + 3)
        row = first + packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        limit = tl.load(visible + row, mask=live, other=0).to(tl.int32)
        seen = tl.max(limit, 0)
        if hidden is None:
            lowest = 0
        else:
            # a window: whole key blocks before the first key of any row are passed over
            first_key = tl.load(hidden + row, mask=live, other=2**30).to(tl.int32)
            lowest = tl.minimum(tl.min(first_key, 0), seen) // BLOCK_N * BLOCK_N
        per_split = tl.cdiv(tl.cdiv(seen - lowest, BLOCK_N), splits) * BLOCK_N
        begin = lowest + split * per_split
        end = tl.minimum(begin + per_split, seen)

        wanted = live & (begin < end)
        q = tl.load(query + row[:, None] * stride_qn + head[:, None] * stride_qh + dims[None, :], mask=wanted[:, None],
                    other=0.0)
        pages = page_table + sequence * stride_table
        keys = key_cache + kv_head.to(tl.int64) * stride_kh
        values = value_cache + kv_head.to(tl.int64) * stride_vh
        maximum = tl.full([BLOCK_M], float('-inf'), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, SIZE], tl.float32)
        # The page is carried from block to block: loaded where it is used, it would be pipelined like the keys and
        # halve the depth of their own pipeline.
        page = _page(pages, begin, end, PAGE, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            # keys that no row sees are never loaded: a weight of zero does not undo the NaN that a freed page may hold
            inside = (key < end)[:, None]
            at = page * stride_kp + (key % PAGE) * stride_ks
            k = tl.load(keys + at[:, None] + dims[None, :], mask=inside, other=0.0)
            at = page * stride_vp + (key % PAGE) * stride_vs
            v = tl.load(values + at[:, None] + dims[None, :], mask=inside, other=0.0)
            page = _page(pages, start + BLOCK_N, end, PAGE, BLOCK_N)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            # a split ends between two blocks or where its tile does: the rows' own ends hide all that must be hidden
            if hidden is None:
                scores = tl.where(key[None, :] < limit[:, None], scores, float('-inf'))
            else:
                own = (key[None, :] < limit[:, None]) & (key[None, :] >= first_key[:, None])
                scores = tl.where(own, scores, float('-inf'))
            larger = tl.maximum(maximum, tl.max(scores, 1))
            # a row that sees no key yet has the maximum -inf, and -inf - -inf is NaN
            base = tl.where(larger == float('-inf'), 0.0, larger * scale)
            weights = tl.exp2(scores * scale - base[:, None])
            shrink = tl.exp2(maximum * scale - base)
            total = total * shrink + tl.sum(weights, 1)
            maximum = larger
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

        if splits == 1:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            at = (row * heads + head) * SIZE
            tl.store(out + at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
        else:
            slot = ((tile * KV_HEADS + kv_head) * splits + split).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(maxima + slot, maximum * scale, mask=live)
            tl.store(sums + slot, total, mask=live)
            tl.store(partial + slot[:, None] * SIZE + dims[None, :], acc, mask=wanted[:, None])


@triton.jit(do_not_specialize=['programs', 'full', 'most_splits'])
def _reduce_kernel(partial, maxima, sums, tiles, count, out, programs, full, most_splits, KV_HEADS: tl.constexpr,
                   GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
                   FORCED: tl.constexpr):
    """The splits' sums, rescaled to the common maximum and added in a fixed order; several programs share a tile and
    key head. Nothing where there is one split."""
    items = tl.load(count) * KV_HEADS
    splits = _number_of_splits(items, programs, full, most_splits, FORCED)
    if splits == 1:
        return
    # so many programs an item
    share = tl.minimum(tl.maximum(tl.num_programs(0) // tl.maximum(items, 1), 1), BLOCK_M)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, SIZE)
    for part in range(tl.program_id(0), items * share, tl.num_programs(0)):
        item = part // share
        kv_head = item % KV_HEADS
        tile = item // KV_HEADS
        first = tl.load(tiles + tile * 4 + 1).to(tl.int64)
        begin = tl.load(tiles + tile * 4 + 2)
        live = tl.minimum(tl.load(tiles + tile * 4 + 3) - begin, BLOCK_M)
        for index in range(part % share, live, share):
            slot = (item * splits + split).to(tl.int64) * BLOCK_M + index
            maximum = tl.load(maxima + slot, mask=split < splits, other=float('-inf'))
            total = tl.load(sums + slot, mask=split < splits, other=0.0)
            # a split without keys has written no sum
            acc = tl.load(partial + slot[:, None] * SIZE + dims[None, :], mask=(total > 0)[:, None], other=0.0)
            largest = tl.max(maximum, 0)
            weight = tl.exp2(maximum - tl.where(largest == float('-inf'), 0.0, largest))
            total = tl.sum(total * weight, 0)
            result = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
            packed = begin + index
            at = (first + packed // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP
            tl.store(out + at * SIZE + dims, result.to(out.dtype.element_ty))


@cache
def _processors(device: torch.device) -> int:
    # the interpreter, which has none, runs a program after the other
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == 'cuda' else 4


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, start: Tensor, visible: Tensor,
           work: AttentionWork, max_kv: int, scale: float, splits: int | None, programs: int | None,
           hidden: Tensor | None) -> None:
    rows, heads, size = query.shape
    page_size, kv_heads = key_cache.size(1), key_cache.size(2)
    sequences = page_table.size(0)
    if size not in (16, 32, 64, 128):
        raise ValueError(f'query of head size {size}: ragged_attention takes 16, 32, 64 or 128')
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f'pages of {page_size} tokens: ragged_attention takes a power of two from 16')
    if key_cache.shape != value_cache.shape or key_cache.size(3) != size or heads % kv_heads:
        raise ValueError(f'query {tuple(query.shape)}, caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)}: '
                         'ragged_attention takes one head size and a multiple of the key heads')
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f'query of {query.dtype}, caches of {key_cache.dtype} and {value_cache.dtype}: '
                         'ragged_attention takes one data type')
    if not query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == page_table.stride(1) == 1:
        raise ValueError(f'strides {query.stride()}, {key_cache.stride()}, {value_cache.stride()} and '
                         f'{page_table.stride()}: ragged_attention takes unit stride in the last axis')
    if start.shape != (sequences + 1,) or visible.shape != (rows,) or not visible.is_contiguous():
        raise ValueError(f'start {tuple(start.shape)}, visible {tuple(visible.shape)}: ragged_attention takes '
                         f'{sequences + 1} for {sequences} rows of page_table, and {rows}, contiguous')
    if hidden is not None and (hidden.shape != visible.shape or hidden.dtype not in _INTEGERS
                               or not hidden.is_contiguous()):
        raise ValueError(f'hidden {tuple(hidden.shape)} of {hidden.dtype}: ragged_attention takes {rows} of int32 or '
                         'int64, contiguous')
    if visible.dtype not in _INTEGERS or page_table.dtype not in _INTEGERS:
        raise ValueError(f'visible of {visible.dtype}, page_table of {page_table.dtype}: ragged_attention takes int32 '
                         'or int64')
    if work.group != heads // kv_heads or work.tiles.size(0) < most_tiles(sequences, work.group, rows, work.tile):
        raise ValueError(f'work has room for {work.tiles.size(0)} tiles {tuple(work.tile)} of groups of {work.group}: '
                         f'ragged_attention takes groups of {heads // kv_heads} and all of {rows} rows of {sequences} '
                         'sequences')
    if not scale > 0:
        raise ValueError(f'scale={scale!r}: ragged_attention takes a positive factor')
    if max_kv < 0:
        raise ValueError(f'max_kv={max_kv}: ragged_attention takes a bound from 0')
    if splits is not None and not 1 <= splits <= _MAX_SPLITS:
        raise ValueError(f'splits={splits}: ragged_attention takes 1 to {_MAX_SPLITS}')
    if programs is not None and programs < 1:
        raise ValueError(f'programs={programs}: ragged_attention takes at least 1')


def ragged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, start: Tensor,
                     visible: Tensor, work: AttentionWork, max_kv: int, scale: float, splits: int | None = None,
                     programs: int | None = None, hidden: Tensor | None = None) -> Tensor:
    """Attention of a ragged batch over the paged cache: a row sees the first keys of its sequence, as many as it says,
    less those that its window hides.

    Args:
        query: [N, H, D] float32, bfloat16 or float16, unit stride in D; D is 16, 32, 64 or 128. The rows of a sequence
            are contiguous; rows from start[S] on belong to none and their output is left unwritten.
        key_cache, value_cache: [B, G, Hkv, D] in the dtype of the query, unit stride in D; G a power of two from 16.
            Slots that no row sees may hold anything, those that some rows of a sequence see hold numbers.
        page_table: [S, P] int32 or int64, page of each G tokens of a sequence; unused columns may hold anything.
        start: [S + 1] int64, first row of each sequence; a sequence may have none.
        visible: [N] int64 or int32, number of keys that a row sees; one that sees none gets 0.
        work: of `attention_work` for `start`, with room for N rows.
        max_kv: bound of `visible`; a loose one is fine.
        scale: factor of the scores; positive.
        splits: into how many parts the keys of a tile are cut, 1 to 32; None takes a number by the tiles there are. A
            row's bits are the same in any company for a fixed number, whose partial sums take float32 room for
            `splits` outputs of as many tiles as `work` has room for.
        programs: how many run; None takes a number by the GPU.
        hidden: [N] int64 or int32, how many of the first keys a row does not see; None hides none. The keys of a
            sequence that all of its rows are blind to are not read, up to whole blocks of keys.

    Returns:
        [N, H, D] in the dtype of the query, contiguous; accumulated in float32.

    Raises:
        ValueError: shapes, strides, data types or bounds that the kernel cannot take.
    """
    _check(query, key_cache, value_cache, page_table, start, visible, work, max_kv, scale, splits, programs, hidden)
    rows, heads, size = query.shape
    kv_heads = key_cache.size(2)
    out = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    most_items = work.tiles.size(0) * kv_heads
    if not rows or not most_items:
        return out
    processors = _processors(query.device)
    programs = programs or _PROGRAMS_PER_PROCESSOR * processors
    most_splits = splits or min(_MAX_SPLITS, triton.next_power_of_2(max(1, -(-max_kv // _MIN_SPLIT_KEYS))))
    decide = {'programs': programs, 'full': triton.cdiv(programs * _FULL_SHARE[0], _FULL_SHARE[1]),
              'most_splits': most_splits}
    shape = {'KV_HEADS': kv_heads, 'GROUP': work.group, 'SIZE': size, 'BLOCK_M': work.tile.block_m,
             'FORCED': splits is not None}
    partial, maxima, sums = out, out, out
    if most_splits > 1:
        # the smallest power of two that fills the programs leaves fewer than twice as many parts
        slots = most_items * most_splits if splits else min(2 * programs, most_items * most_splits)
        partial = torch.empty((slots, work.tile.block_m, size), dtype=torch.float32, device=query.device)
        maxima, sums = torch.empty((2, slots, work.tile.block_m), dtype=torch.float32, device=query.device)
    _attend_kernel[(min(programs, most_items * most_splits),)](
        query, key_cache, value_cache, page_table, visible, hidden, work.tiles, work.count, out, partial, maxima, sums,
        scale * math.log2(math.e), **decide, stride_qn=query.stride(0), stride_qh=query.stride(1),
        stride_kp=key_cache.stride(0), stride_ks=key_cache.stride(1), stride_kh=key_cache.stride(2),
        stride_vp=value_cache.stride(0), stride_vs=value_cache.stride(1), stride_vh=value_cache.stride(2),
        stride_table=page_table.stride(0), PAGE=key_cache.size(1), BLOCK_N=work.tile.block_n,
        PRECISION='ieee' if query.dtype == torch.float32 else 'tf32', num_warps=work.tile.num_warps,
        num_stages=work.tile.num_stages, **shape)
    if most_splits > 1:
        # a fixed width, whatever the splits: the order of the sum is always the same
        grid = min(_REDUCE_PROGRAMS_PER_PROCESSOR * processors, most_items * work.tile.block_m)
        _reduce_kernel[(grid,)](partial, maxima, sums, work.tiles, work.count, out, **decide, SPLITS=_MAX_SPLITS,
                                num_warps=4, **shape)
    return out
