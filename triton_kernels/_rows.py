"""What the step's kernels share: columns of the state; which sequences fit, where rows go, what wrappers refuse."""
from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from .layout import FIELDS, TOTALS, TURNS, Pace, Plan, Rows, state_width

# columns of a state row behind the token ids
MASKED = tl.constexpr(FIELDS.index('masked'))
UNCACHED = tl.constexpr(FIELDS.index('uncached'))
PENDING = tl.constexpr(FIELDS.index('pending'))
PROGRESS = tl.constexpr(FIELDS.index('progress'))
DECODED = tl.constexpr(FIELDS.index('decoded'))
STEPS = tl.constexpr(FIELDS.index('steps'))
HISTORY = tl.constexpr(FIELDS.index('history'))
APPENDABLE = tl.constexpr(FIELDS.index('appendable'))
RANDOM_OFFSET = tl.constexpr(FIELDS.index('random_offset'))
OUTPUT_START = tl.constexpr(FIELDS.index('output_start'))
ALIVE = tl.constexpr(FIELDS.index('alive'))
ALPHA = tl.constexpr(FIELDS.index('alpha'))
THRESHOLD = tl.constexpr(FIELDS.index('threshold'))
# row turn % _TURNS of the totals has _TOTALS columns
_TURNS, _TOTALS = tl.constexpr(TURNS), tl.constexpr(TOTALS)
# padding rows that a program cleans
CHUNK = 512


@triton.jit
def ones(bits):
    """Number of set bits; the shifts copy the sign, the masks drop the copies."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits = bits + (bits >> 8)
    bits = bits + (bits >> 16)
    return ((bits + (bits >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def admitted(number, index, first, limit):
    """Which sequences fit, one a lane, when `first` is counted first; after one that does not, no other does."""
    total = tl.sum(number, 0)
    skipped = tl.sum(tl.where(index < first, number, 0), 0)
    running = tl.cumsum(number, 0) - skipped + tl.where(index < first, total, 0)
    return running <= limit


@triton.jit
def lanes(pending, current, lane, LENGTH: tl.constexpr):
    """Flags of 2 L lanes in text order, from the maps of the finished block and of the current one."""
    inside = lane < 2 * LENGTH
    place = tl.where(inside, tl.where(lane < LENGTH, lane, lane - LENGTH), 0)
    return (((tl.where(lane < LENGTH, pending, current) >> place) & 1) != 0) & inside


@triton.jit
def list_rows(candidates, chosen, row, position, LENGTH: tl.constexpr):
    """The rows of the chosen lanes, all of the current block, and -1 beyond."""
    nth = tl.cumsum(chosen.to(tl.int32), 0) - 1
    at = tl.where(chosen, nth, tl.sum(chosen.to(tl.int32), 0) + position - nth - 1)
    tl.store(candidates + at, tl.where(chosen, row, -1), mask=(position >= 0) & (position < LENGTH))


@triton.jit
def store_starts(start, number, index, sequences):
    """Where each sequence's rows begin, and their number."""
    tl.store(start + index, (tl.cumsum(number, 0) - number).to(tl.int64), mask=index < sequences)
    tl.store(start + sequences, tl.sum(number, 0).to(tl.int64))


@triton.jit
def tell(totals, turn, column: tl.constexpr, value):
    """Write one of the step's totals."""
    tl.store(totals + (turn % _TURNS) * _TOTALS + column, value.to(tl.int32))


def expect_state(table: Tensor, length: int, pace: Pace) -> None:
    """Refuse a table that is none of blocks of L, and a pace that is none.

    Raises:
        ValueError: with the argument's name, what it is and what it should be.
    """
    if not 1 <= length <= 64:
        raise ValueError(f'length={length}: the kernels take block lengths from 1 to 64')
    if (table.ndim != 2 or table.size(0) < 1 or table.size(1) != state_width(length) or table.stride(1) != 1
            or table.dtype != torch.int64):
        raise ValueError(f'table is {tuple(table.shape)} of {table.dtype}, strides {table.stride()}: the kernel takes '
                         f'[S, {state_width(length)}] of torch.int64 with contiguous rows, S at least 1')
    expect('pace.limits', pace.limits, (3,), torch.int64)
    expect('pace.turn', pace.turn, (1,), torch.int64)
    expect('pace.totals', pace.totals, (TURNS, TOTALS), torch.int32)


def expect_rows(name: str, rows: Rows, sequences: int, length: int) -> None:
    """Refuse rows that are not of so many sequences with blocks of L, or whose buffers differ in length.

    Raises:
        ValueError: with the tensor's name, what it is and what it should be.
    """
    shapes: dict[str, tuple[int, ...]] = {
        'start': (sequences + 1,), 'current': (sequences,), 'pending': (sequences,), 'candidates': (sequences, length),
        'rightmost': (sequences,), 'sampled_start': (sequences + 1,)}
    if isinstance(rows, Plan):
        shapes |= dict.fromkeys(('sampled', 'sampled_sequence', 'sampled_position'), (rows.sampled.numel(),))
    for f in fields(rows):
        expect(f'{name}.{f.name}', getattr(rows, f.name), shapes.get(f.name, (rows.sequence.numel(),)), torch.int64)


def expect_visible(kv_visible: str) -> None:
    """Refuse an unknown rule of which keys a row sees.

    Raises:
        ValueError: with the value and what there is.
    """
    if kv_visible not in ('progress', 'reference'):
        raise ValueError(f'kv_visible={kv_visible!r} is not one of progress, reference')
