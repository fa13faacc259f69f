"""The rows that enter a step in one launch, without a word from the host; twin: `reference_enter.enter`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._rows import (
    ALIVE,
    CHUNK,
    HISTORY,
    MASKED,
    PENDING,
    PROGRESS,
    UNCACHED,
    admitted,
    expect_rows,
    expect_state,
    expect_visible,
    lanes,
    list_rows,
    ones,
    store_starts,
    tell,
)
from .layout import Pace, Rows

__all__ = ['enter']


@triton.jit
def _wanted(table, stride, index, sequences, LENGTH: tl.constexpr, FULL: tl.constexpr):
    """Rows that each sequence would like to enter, one sequence a lane."""
    known = index < sequences
    row = table + index.to(tl.int64) * stride + 2 * LENGTH
    alive = tl.load(row + ALIVE, mask=known, other=0)
    current = tl.load(row + UNCACHED, mask=known, other=0)
    pending = tl.load(row + PENDING, mask=known, other=0)
    return tl.where(alive != 0, ones(current & FULL) + ones(pending & FULL), 0)


@triton.jit
def _enter_kernel(table, stride, page_table, page_stride, page_size, limits, turn, totals, start, sequence_of,
                  position_of, position_ids, input_ids, pages, offsets, visible, current_of, pending_of, candidates,
                  sequences, capacity, LENGTH: tl.constexpr, FULL: tl.constexpr, LANES: tl.constexpr,
                  SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, REFERENCE: tl.constexpr):
    """A program for each sequence, each of which counts what the others want; the programs beyond clean the padding."""
    sequence = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    limit = tl.minimum(tl.load(limits), capacity)
    step = tl.load(turn)
    first = (step % sequences).to(tl.int32)
    if sequence >= sequences:
        clean = (sequence - sequences) * CHUNK
        if (clean == 0) | (clean < limit):
            number = _wanted(table, stride, index, sequences, LENGTH, FULL)
            fits = admitted(number, index, first, limit)
            entering = tl.where(fits, number, 0)
            if clean == 0:
                store_starts(start, entering, index, sequences)
                tell(totals, step, 0, tl.sum(number, 0))
                tell(totals, step, 3, tl.sum(((number > 0) & (fits == 0)).to(tl.int32), 0))
            at = tl.sum(entering, 0) + clean + tl.arange(0, CHUNK)
            padding = at < limit
            tl.store(sequence_of + at, 0, mask=padding)
            tl.store(position_of + at, 0, mask=padding)
            tl.store(position_ids + at, 0, mask=padding)
            tl.store(input_ids + at, 0, mask=padding)
            tl.store(pages + at, -1, mask=padding)
            tl.store(offsets + at, 0, mask=padding)
            tl.store(visible + at, 0, mask=padding)
        return

    own = sequence.to(tl.int64)
    ids = table + own * stride
    row = ids + 2 * LENGTH
    alive = tl.load(row + ALIVE)
    current, pending = tl.load(row + UNCACHED) & FULL, tl.load(row + PENDING) & FULL
    waiting, history, progress = tl.load(row + MASKED), tl.load(row + HISTORY), tl.load(row + PROGRESS)
    lane = tl.arange(0, LANES)
    position = lane - LENGTH
    if alive == 0:
        tl.store(current_of + own, alive)
        tl.store(pending_of + own, alive)
        tl.store(candidates + own * LENGTH + lane, -1, mask=lane < LENGTH)
        return
    number = _wanted(table, stride, index, sequences, LENGTH, FULL)
    fits = admitted(number, index, first, limit)
    before = tl.sum(tl.where(fits & (index < sequence), number, 0), 0)
    fits_here = tl.sum((fits & (index == sequence)).to(tl.int32), 0) > 0
    current, pending = tl.where(fits_here, current, 0), tl.where(fits_here, pending, 0)
    tl.store(current_of + own, current)
    tl.store(pending_of + own, pending)

    enters = lanes(pending, current, lane, LENGTH)
    at = before + tl.cumsum(enters.to(tl.int32), 0) - 1
    text = history + position
    page = tl.load(page_table + own * page_stride + text // page_size, mask=enters, other=-1).to(tl.int64)
    token = tl.load(ids + tl.where(position < 0, lane + LENGTH, position), mask=enters, other=0)
    right = tl.max(tl.where(enters, position, -1), 0)
    last = right if REFERENCE else tl.maximum(right, progress)
    tl.store(sequence_of + at, own, mask=enters)
    tl.store(position_of + at, position.to(tl.int64), mask=enters)
    tl.store(position_ids + at, text, mask=enters)
    tl.store(input_ids + at, token, mask=enters)
    tl.store(pages + at, page, mask=enters)
    tl.store(offsets + at, text % page_size, mask=enters)
    tl.store(visible + at, tl.where(position < 0, history, history + last + 1), mask=enters)
    list_rows(candidates + own * LENGTH, lanes(waiting * 0, waiting & current, lane, LENGTH), at, position, LENGTH)


def enter(table: Tensor, page_table: Tensor, page_size: int, pace: Pace, length: int, kv_visible: str = 'progress',
          out: Rows | None = None) -> Rows:
    """Which positions enter a step, and their rows (FOCUS, section 3.5).

    Of a sequence that is alive these are the positions of its finished block that are still to be committed, then
    those of its block that are not cached yet. Sequences that do not fit wait; who comes first changes with the turn.

    Args:
        table: [S, state_width(L)] int64, a row of state a sequence; rows contiguous, any distance apart.
        page_table: [S, P] int64 or int32.
        page_size: G.
        pace: limits and turn of the step; its totals are told how many rows wanted to enter and how many sequences
            wait. Never more rows enter than `out` has room for.
        length: L, at most 64.
        kv_visible: 'progress' or 'reference'.
        out: where to write, apart from all other arguments; None makes room for all rows that there may be.

    Raises:
        ValueError: an argument that the kernel cannot take, or an unknown option.
    """
    expect_state(table, length, pace)
    expect_visible(kv_visible)
    sequences = table.size(0)
    if page_size < 1:
        raise ValueError(f'page_size={page_size}: at least 1')
    if page_table.ndim != 2 or page_table.size(0) != sequences or page_table.stride(1) != 1 or (
            page_table.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f'page_table is {tuple(page_table.shape)} of {page_table.dtype}, strides '
                         f'{page_table.stride()}: the kernel takes [{sequences}, P] of int32 or int64 with contiguous '
                         'rows')
    if out is None:
        out = Rows.empty(sequences, length, sequences * 2 * length, table.device)
    expect_rows('out', out, sequences, length)
    capacity = out.sequence.numel()
    _enter_kernel[(sequences + max(1, triton.cdiv(capacity, CHUNK)),)](
        table, table.stride(0), page_table, page_table.stride(0), page_size, pace.limits, pace.turn, pace.totals,
        out.start, out.sequence, out.position, out.position_ids, out.input_ids, out.pages, out.offsets, out.visible,
        out.current, out.pending, out.candidates, sequences, capacity, LENGTH=length,
        FULL=-1 if length == 64 else (1 << length) - 1, LANES=triton.next_power_of_2(2 * length),
        SEQUENCES=triton.next_power_of_2(sequences), CHUNK=CHUNK, REFERENCE=kv_visible == 'reference', num_warps=4)
    return out
