"""Greedy sampling in one pass over the vocabulary; twin: `reference_greedy_head.greedy_head`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ['greedy_head']

# A program reads one part of a row into registers, all loads in flight at once. Parts of a fixed size, not as many as
# fill the GPU: the order of the sum, and with it the last bit of a confidence, must not depend on the number of rows.
# One row of 151936 logits makes 38 programs; from 4 rows on every multiprocessor has work. Six programs fit on one.
_PART = 4096
_WARPS = 4


@triton.jit
def _part_kernel(logits, count, best, tokens, sums, row_stride, vocabulary, mask_token, PART: tl.constexpr,
                 COUNTED: tl.constexpr):
    """Maximum, its first token, and the sum of exponentials below it, of one part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.num_programs(0)
    if COUNTED:
        limit = tl.load(count)
    if row >= limit:
        return
    token = part * PART + tl.arange(0, PART)
    # the ban is no part of the mask of the load, which would then not be one of 16 bytes a thread
    values = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float('-inf')).to(tl.float32)
    values = tl.where(token == mask_token, float('-inf'), values)
    # NaN counts as the largest number; a second copy of the values would cost a third of the registers
    strange = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.where(strange, float('inf'), tl.max(values, 0))
    first = tl.min(tl.where((values == top) | (values != values), token, 2147483647), 0)
    # a part that is banned as a whole has no largest logit to subtract
    total = tl.sum(tl.exp(values - tl.where(top == float('-inf'), 0.0, top)), 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, top)
    tl.store(tokens + at, first)
    tl.store(sums + at, total)


@triton.jit
def _row_kernel(best, tokens, sums, count, out_tokens, out_scores, parts, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    """One row from its parts."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.num_programs(0)
    if COUNTED:
        limit = tl.load(count)
    if row >= limit:
        tl.store(out_tokens + row, -1)
        tl.store(out_scores + row, 0.0)
        return
    part = tl.arange(0, BLOCK)
    at = row * parts + part
    tops = tl.load(best + at, mask=part < parts, other=float('-inf'))
    firsts = tl.load(tokens + at, mask=part < parts, other=2147483647)
    totals = tl.load(sums + at, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    tl.store(out_tokens + row, tl.min(tl.where(tops == top, firsts, 2147483647), 0).to(tl.int64))
    total = tl.sum(tl.where(part < parts, totals * tl.exp(tops - top), 0.0), 0)
    tl.store(out_scores + row, 1.0 / total)


def greedy_head(logits: Tensor, mask_token: int, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Greedy sampling and confidence of R rows.

    A row's token and confidence depend on that row alone, to the last bit.

    Args:
        logits: [R, V] float32, bfloat16 or float16, unit stride in V; not changed.
        mask_token: banned in every row: it would be committed as text.
        count: [1] int32 or int64, number of rows that are real; None for all.

    Returns:
        Tokens [R] int64, the smallest of equally probable ones, and their softmax probability [R] float32. A row with a
        logit that is not a number gives the first such token and NaN. Rows from `count` on give -1 and 0.

    Raises:
        ValueError: an argument that the kernels cannot take.
    """
    if logits.ndim != 2 or logits.size(1) < 1 or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(f'logits {tuple(logits.shape)} of {logits.dtype}, strides {logits.stride()}: greedy_head '
                         'takes [R, V] of floating point, V at least 1 and contiguous')
    rows, vocabulary = logits.shape
    if not 0 <= mask_token < vocabulary:
        raise ValueError(f'mask_token={mask_token}: from 0 to {vocabulary - 1}')
    if count is not None and (count.numel() != 1 or count.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f'count {tuple(count.shape)} of {count.dtype}: greedy_head takes one int32 or int64')
    parts = triton.cdiv(vocabulary, _PART)
    best, sums = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        counted = count is not None
        _part_kernel[(rows, parts)](logits, count, best, firsts, sums, logits.stride(0), vocabulary, mask_token,
                                    PART=_PART, COUNTED=counted, num_warps=_WARPS)
        _row_kernel[(rows,)](best, firsts, sums, count, tokens, scores, parts,
                             BLOCK=max(32, triton.next_power_of_2(parts)), COUNTED=counted, num_warps=1)
    return tokens, scores
