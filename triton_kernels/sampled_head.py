"""Filtered and seeded sampling in one pass over the vocabulary; twin: `reference_sampled_head.sampled_head`.

1. `_part_kernel`, a program for each part of a row: the sums of the confidence, and the largest logit of each chunk.
2. `_chunk_kernel`, a program for each row: the 64 chunks with the largest maxima. Order tokens by logit, equal ones by
   token: a token outside of these chunks has the best tokens of 64 chunks ahead of it, so it is none of the 64 best.
3. `_candidate_kernel`, a program for each row: the 64 best tokens in those chunks.
4. `_draw_kernel`, a program for each row: filters, draw and confidence.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect

__all__ = ['sampled_head']

# The greedy head's parts and warps: at temperature 1 its confidence and this one have the same bits.
_PART = 4096
_CHUNK = 128
_CANDIDATES = 64  # most tokens that a row may draw from
# where the counts of `_slots` would run over
_LARGEST = 2**21
# low bits of a float32 that no value of the data type tells apart
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _part_kernel(logits, count, sequence, temperature, tops, sums, maxima, row_stride, vocabulary, mask_token,
                 PART: tl.constexpr, CHUNK: tl.constexpr):
    """Maximum of one part of a row, the sum of exponentials below it, and the maximum of each of its chunks."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(count):
        return
    token = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float('-inf')).to(tl.float32)
    scale = 1.0 / tl.load(temperature + tl.load(sequence + row))
    values = tl.where(token == mask_token, float('-inf'), values)
    # NaN counts as the largest number; infinity minus itself makes the confidence NaN all the same
    values = tl.where(values != values, float('inf'), values)
    CHUNKS: tl.constexpr = PART // CHUNK
    best = tl.max(tl.reshape(values, (CHUNKS, CHUNK)), 1)
    top = tl.max(best, 0)
    # a part that is banned as a whole has no largest logit to subtract
    total = tl.sum(tl.exp((values - tl.where(top == float('-inf'), 0.0, top)) * scale), 0)
    at = row * tl.num_programs(1) + part
    tl.store(maxima + at * CHUNKS + tl.arange(0, CHUNKS), best)
    tl.store(tops + at, top)
    tl.store(sums + at, total)


@triton.jit
def _slots(values, valid, K: tl.constexpr, SPARE: tl.constexpr):
    """Which of N values are among the K largest of the valid ones, and how many of those come before each.

    Of equal values the first ones are taken; all of them where there are not more than K.
    """
    # unsigned integers in the order of the numbers; -0.0 equals 0.0, and what is not valid is below -inf
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    keys = tl.where(valid, keys, 0) >> SPARE
    # the K-th largest key, bit by bit
    least, bit = tl.full((), 0, tl.uint32), tl.full((), 1 << (31 - SPARE), tl.uint32)
    for _ in range(32 - SPARE):
        trial = least | bit
        least = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= K, trial, least)
        bit = bit >> 1
    above, equal = keys > least, valid & (keys == least)
    wanted = K - tl.sum(above.to(tl.int32), 0)
    # both running counts in one: neither reaches 2**15
    counts = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(counts, 0) - counts
    ties = before >> 16
    return above | (equal & (ties < wanted)), (before & 65535) + tl.minimum(ties, wanted)


@triton.jit
def _chunk_kernel(maxima, count, chosen, chunks, stride, K: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of the K chunks of a row with the largest maxima, in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    chunk = tl.arange(0, BLOCK)
    values = tl.load(maxima + row * stride + chunk, mask=chunk < chunks, other=float('-inf'))
    taken, slot = _slots(values, chunk < chunks, K, SPARE)
    tl.store(chosen + row * K + slot, chunk, mask=taken)


@triton.jit
def _candidate_kernel(logits, count, chosen, values_out, tokens_out, chunks, row_stride, vocabulary, mask_token,
                      K: tl.constexpr, CHUNK: tl.constexpr, SPARE: tl.constexpr):
    """The K best tokens of a row and their logits, in ascending order of the token."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        return
    index = tl.arange(0, K)
    # a small vocabulary has fewer chunks: the rest are beyond its end
    chunk = tl.load(chosen + row * K + index, mask=index < chunks, other=chunks)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float('-inf')).to(tl.float32)
    values = tl.where(token == mask_token, float('-inf'), values)
    values = tl.reshape(tl.where(values != values, float('inf'), values), (K * CHUNK,))
    token = tl.reshape(token, (K * CHUNK,))
    taken, slot = _slots(values, token < vocabulary, K, SPARE)
    tl.store(values_out + row * K + slot, values, mask=taken)
    tl.store(tokens_out + row * K + slot, token, mask=taken)


@triton.jit
def _draw_kernel(candidates, candidate_tokens, tops, sums, count, sequence, position, temperature, top_k, top_p, min_p,
                 seeds, random_offset, offset_stride, length, out_tokens, out_scores, held, parts,
                 K: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Filters, draw and confidence of one row; float64 makes every comparison the twin's.

    As in LMDeploy, top-p keeps a candidate if the probability of those before it, among the top_k, is not above top_p,
    and min-p if its own is not below min_p times the largest. Weights that are not normalised serve as well.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count):
        tl.store(out_tokens + row, -1)
        tl.store(out_scores + row, 0.0)
        return
    owner = tl.load(sequence + row)
    heat = tl.load(temperature + owner)
    index = tl.arange(0, K)
    real = index < held
    values = tl.load(candidates + row * K + index, mask=real, other=float('-inf'))
    top = tl.max(values, 0).to(tl.float64)
    # place of each candidate, and the weights of those before it: comparing all pairs takes the place of sorting
    rank = tl.zeros((K,), dtype=tl.int32)
    starts = tl.zeros((K,), dtype=tl.float64)
    limit = tl.load(top_k + owner)
    for first in range(0, K, STEP):
        other = first + tl.arange(0, STEP)
        rivals = tl.load(candidates + row * K + other, mask=other < held, other=float('-inf'))
        ahead = (rivals[None, :] > values[:, None]) | ((rivals[None, :] == values[:, None])
                                                       & (other[None, :] < index[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
        rival_weights = tl.exp((rivals.to(tl.float64) - top) / heat.to(tl.float64))
        starts += tl.sum(tl.where(ahead, rival_weights[None, :], 0.0), 1)
    weights = tl.exp((values.to(tl.float64) - top) / heat.to(tl.float64))
    ends = starts + weights
    kept = real & (rank < limit)
    total = tl.max(tl.where(kept, ends, 0.0), 0)
    kept = kept & ((rank == 0) | ((starts <= tl.load(top_p + owner).to(tl.float64) * total)
                                  & (weights >= tl.load(min_p + owner).to(tl.float64))))
    # what stays is a prefix of the ranks, so its sums are the same
    total = tl.max(tl.where(kept, ends, 0.0), 0)
    offset = tl.load(random_offset + owner * offset_stride) * length + tl.load(position + row)
    number = tl.rand(tl.load(seeds + owner), offset.to(tl.int32))
    # comparisons with NaN are false: a row that is not all numbers takes its first candidate, as the greedy head does
    drawn = tl.sum((kept & (ends < number.to(tl.float64) * total)).to(tl.int32), 0)
    here = real & (rank == drawn)
    token = tl.max(tl.where(here, tl.load(candidate_tokens + row * K + index, mask=real, other=0), 0), 0)
    value = tl.max(tl.where(here, values, float('-inf')), 0)
    tl.store(out_tokens + row, token.to(tl.int64))
    _store_score(out_scores, row, value, tops, sums, 1.0 / heat, parts, BLOCK)


@triton.jit
def _store_score(out, row, value, tops, sums, scale, parts, BLOCK: tl.constexpr):
    """Probability of a logit over the whole row; the largest one's is the greedy head's at temperature 1."""
    part = tl.arange(0, BLOCK)
    at = row * parts + part
    maxima = tl.load(tops + at, mask=part < parts, other=float('-inf'))
    totals = tl.load(sums + at, mask=part < parts, other=0.0)
    top = tl.max(maxima, 0)
    total = tl.sum(tl.where(part < parts, totals * tl.exp((maxima - top) * scale), 0.0), 0)
    tl.store(out + row, tl.exp((value - top) * scale) * (1.0 / total))


def _check(logits: Tensor, mask_token: int, count: Tensor, rows: dict[str, Tensor], floats: dict[str, Tensor],
           integers: dict[str, Tensor], random_offset: Tensor) -> None:
    """Refuse what the kernels cannot take."""
    if (logits.ndim != 2 or not 1 <= logits.size(1) <= _LARGEST or logits.stride(1) != 1
            or logits.dtype not in _SPARE_BITS):
        raise ValueError(f'logits {tuple(logits.shape)} of {logits.dtype}, strides {logits.stride()}: sampled_head '
                         f'takes [R, V] of {", ".join(map(str, _SPARE_BITS))}, V from 1 to {_LARGEST} and contiguous')
    if not 0 <= mask_token < logits.size(1):
        raise ValueError(f'mask_token={mask_token}: from 0 to {logits.size(1) - 1}')
    if count.numel() != 1 or count.dtype not in (torch.int32, torch.int64):
        raise ValueError(f'count {tuple(count.shape)} of {count.dtype}: sampled_head takes one int32 or int64')
    if random_offset.ndim != 1 or random_offset.dtype != torch.int64:
        raise ValueError(f'random_offset {tuple(random_offset.shape)} of {random_offset.dtype}: sampled_head takes [S] '
                         'of torch.int64')
    for name, tensor in rows.items():
        expect(name, tensor, (logits.size(0),), torch.int64)
    for name, tensor in floats.items():
        expect(name, tensor, (random_offset.size(0),), torch.float32)
    for name, tensor in integers.items():
        expect(name, tensor, (random_offset.size(0),), torch.int64)


def sampled_head(logits: Tensor, mask_token: int, count: Tensor, sequence: Tensor, position: Tensor,
                 temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
                 random_offset: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Seeded sampling and confidence of R rows, by the parameters of each row's sequence.

    A row's token and confidence depend on that row and its sequence's parameters alone, to the last bit.

    Args:
        logits: [R, V] float32, bfloat16 or float16, unit stride in V; not changed.
        mask_token: banned in every row: it would be committed as text.
        count: [1] int32 or int64, number of rows that are real.
        sequence, position: [R] int64, sequence and block position of each row; not read beyond `count`.
        temperature: [S] float32, above 0.
        top_k: [S] int64, 1 to 64; 1 takes the greedy head's token.
        top_p, min_p: [S] float32, LMDeploy's; 1 and 0 change nothing.
        seeds: [S] int64, all 64 bits count.
        random_offset: [S] int64, any stride; a row's place in its sequence's random stream is random_offset * length +
            position, modulo 2**32.
        length: L, block positions.

    Returns:
        Tokens [R] int64 and their probability [R] float32: softmax over the whole vocabulary but the mask token, after
        temperature and before any filter. A row with a logit that is not a number or +inf gives the first such token
        and NaN. Rows from `count` on give -1 and 0.

    Raises:
        ValueError: an argument that the kernels cannot take.
    """
    _check(logits, mask_token, count, {'sequence': sequence, 'position': position},
           {'temperature': temperature, 'top_p': top_p, 'min_p': min_p}, {'top_k': top_k, 'seeds': seeds},
           random_offset)
    rows, vocabulary = logits.shape
    parts, chunks = triton.cdiv(vocabulary, _PART), triton.cdiv(vocabulary, _CHUNK)
    tops, sums = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    maxima = torch.empty((rows, parts * _PART // _CHUNK), dtype=torch.float32, device=logits.device)
    chosen, candidate_tokens = torch.empty((2, rows, _CANDIDATES), dtype=torch.int32, device=logits.device)
    candidates = torch.empty((rows, _CANDIDATES), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        spare = _SPARE_BITS[logits.dtype]
        _part_kernel[(rows, parts)](logits, count, sequence, temperature, tops, sums, maxima, logits.stride(0),
                                    vocabulary, mask_token, PART=_PART, CHUNK=_CHUNK, num_warps=4)
        _chunk_kernel[(rows,)](maxima, count, chosen, chunks, maxima.stride(0), K=_CANDIDATES, SPARE=spare,
                               BLOCK=max(_CANDIDATES, triton.next_power_of_2(chunks)), num_warps=4)
        _candidate_kernel[(rows,)](logits, count, chosen, candidates, candidate_tokens, chunks, logits.stride(0),
                                   vocabulary, mask_token, K=_CANDIDATES, CHUNK=_CHUNK, SPARE=spare, num_warps=16)
        _draw_kernel[(rows,)](candidates, candidate_tokens, tops, sums, count, sequence, position, temperature, top_k,
                              top_p, min_p, seeds, random_offset, random_offset.stride(0), length, tokens, scores,
                              min(_CANDIDATES, vocabulary), parts, K=_CANDIDATES, STEP=8,
                              BLOCK=max(32, triton.next_power_of_2(parts)), num_warps=1)
    return tokens, scores
