"""From importance to the suffix in two launches; twin: `reference_plan.plan` (FOCUS, section 3.3 and 3.4, eq. 5).

The first decides, one program a sequence, on lanes that are block positions. The second, one program a sequence again,
knows how many rows each sequence wants to keep: it drops those of sequences that do not fit and gives every other row
its place; no program waits for another.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from ._rows import (
    ALIVE,
    ALPHA,
    CHUNK,
    DECODED,
    HISTORY,
    MASKED,
    PENDING,
    PROGRESS,
    STEPS,
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
from .layout import Pace, Plan, Rows

__all__ = ['plan']

_RANKINGS = {'top': 0, 'bottom': 1, 'random': 2}


@triton.jit
def _noise(history, place, count):
    """The twin's pseudo-random scores: two rounds of a 32-bit hash, in 64 bits."""
    value = ((history + place) * 64 + count) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (value ^ (value >> 16)).to(tl.float32)


@triton.jit
def _budget(count, decoded, steps, alpha):
    """K by eq. 5, with the twin's slack: float64 throughout."""
    mean = decoded.to(tl.float64) / tl.maximum(steps, 1).to(tl.float64)
    mean = tl.maximum(tl.where(steps > 0, mean, 1.0), 1.0)
    slack = tl.full([], 1e-7, tl.float64)
    return tl.minimum(count, tl.maximum(tl.ceil(mean * alpha - slack).to(tl.int64), 1))


@triton.jit
def _keep_kernel(first, second, table, stride, entered_current, entered_pending, keep, kept, pending_of, rightmost,
                 candidates, counts, KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr, RANKING: tl.constexpr, FIXED: tl.constexpr, SEQUENTIAL: tl.constexpr):
    """Which positions of a sequence should stay, and counts [3, S]: its rows, those to be sampled, whether it waits.

    What the plan says of a sequence that did not enter is all written here.
    """
    sequence, sequences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = table + sequence * stride + 2 * LENGTH
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    entered, pending = tl.load(entered_current + sequence), tl.load(entered_pending + sequence)
    tl.store(pending_of + sequence, pending)
    if (entered | pending) == 0:
        ready = (tl.load(row + UNCACHED) | tl.load(row + PENDING)) & FULL
        tl.store(kept + sequence, entered)
        tl.store(rightmost + sequence, entered - 1)
        tl.store(counts + sequence, 0)
        tl.store(counts + sequences + sequence, 0)
        tl.store(counts + 2 * sequences + sequence, ((tl.load(row + ALIVE) != 0) & (ready != 0)).to(tl.int32))
        tl.store(candidates + sequence * LENGTH + place, -1, mask=inside)
        return

    waiting = tl.load(row + MASKED) & entered
    valid = (((waiting >> place) & 1) != 0) & inside
    count = tl.sum(valid.to(tl.int64), 0)
    nth = tl.cumsum(valid.to(tl.int32), 0) - 1

    delta = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    for head in tl.static_range(KV_HEADS):  # a fixed order: the same partial sums give the same delta in any batch
        at = (sequence * KV_HEADS + head) * LENGTH + nth
        delta += tl.load(second + at, mask=valid, other=0.0)
        before += tl.load(first + at, mask=valid, other=0.0)
    delta = delta - before
    if RANKING == 1:
        delta = -delta
    if RANKING == 2:
        delta = _noise(tl.load(row + HISTORY), place, count)
    budget = tl.minimum(count, keep)
    if not FIXED:
        alpha = tl.load(row + ALPHA).to(tl.float64, bitcast=True)
        budget = _budget(count, tl.load(row + DECODED), tl.load(row + STEPS), alpha)

    ranked = tl.where(valid, delta, float('-inf'))
    better = (ranked[None, :] > ranked[:, None]) | ((ranked[None, :] == ranked[:, None])
                                                    & (place[None, :] < place[:, None]))
    rank = tl.sum((better & valid[None, :]).to(tl.int32), 1)
    base = valid & (rank < budget)
    stays = base
    if RANKING == 0 and not FIXED:
        number = tl.maximum(count, 1).to(tl.float64)
        values = tl.where(valid, delta, 0.0).to(tl.float64)
        mean = tl.sum(values, 0) / number
        error = tl.where(valid, values - mean, 0.0)
        deviation = tl.sqrt(tl.sum(error * error, 0) / number)
        likely = valid & (values >= mean + deviation)
        enough = tl.sum(likely.to(tl.int64), 0) >= budget
        base = (enough & likely) | ((enough == 0) & base)
        bits = tl.sum(base.to(tl.int64) << place, 0)
        # the sign that the shift copies is position 63's own bit
        stays = base | (((((bits >> 1) & waiting) >> place) & 1) != 0) & valid
    right = tl.max(tl.where(stays, place, -1), 0)
    stays = stays | (valid & (place < right) & (place > tl.load(row + PROGRESS)))
    # K is at least 1 and all of at most K tokens rank within it: neither case needs a rule of its own
    stays = stays | (valid & (nth < SEQUENTIAL))
    stays = stays | ((((entered & ~waiting) >> place) & 1) != 0) & inside

    tl.store(kept + sequence, tl.sum(stays.to(tl.int64) << place, 0))
    tl.store(rightmost + sequence, tl.max(tl.where(stays, place, -1), 0))
    tl.store(counts + sequence, tl.sum(stays.to(tl.int32), 0) + ones(pending))
    tl.store(counts + sequences + sequence, tl.sum((stays & valid).to(tl.int32), 0))
    tl.store(counts + 2 * sequences + sequence, 0)


@triton.jit
def _clean(clean, number, samples, row_limit, sampled_limit, sequence_of, position_of, position_ids, input_ids, pages,
           offsets, visible, source, sampled, sampled_sequence, sampled_position, CHUNK: tl.constexpr):
    """What a longer step may have left behind the rows, and behind those to be sampled: one chunk of each."""
    at = number + clean + tl.arange(0, CHUNK)
    padding = at < row_limit
    tl.store(sequence_of + at, 0, mask=padding)
    tl.store(position_of + at, 0, mask=padding)
    tl.store(position_ids + at, 0, mask=padding)
    tl.store(input_ids + at, 0, mask=padding)
    tl.store(pages + at, -1, mask=padding)
    tl.store(offsets + at, 0, mask=padding)
    tl.store(visible + at, 0, mask=padding)
    tl.store(source + at, 0, mask=padding)
    at = samples + clean + tl.arange(0, CHUNK)
    padding = at < sampled_limit
    tl.store(sampled + at, 0, mask=padding)
    tl.store(sampled_sequence + at, 0, mask=padding)
    tl.store(sampled_position + at, 0, mask=padding)


@triton.jit
def _rows_kernel(table, stride, counts, limits, turn, totals, entered_current, entered_pending, entered_start,
                 entered_position_ids, entered_input_ids, entered_pages, entered_offsets, start, sequence_of,
                 position_of, position_ids, input_ids, pages, offsets, visible, current_of, pending_of, candidates,
                 source, rightmost, sampled, sampled_sequence, sampled_position, sampled_start, sequences, capacity,
                 sampled_capacity, LENGTH: tl.constexpr, LANES: tl.constexpr, SEQUENCES: tl.constexpr,
                 CHUNK: tl.constexpr, REFERENCE: tl.constexpr):
    """The rows of a sequence, each at its place; the programs beyond the sequences clean the padding."""
    sequence = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    known = index < sequences
    if tl.load(counts + sequence, mask=sequence < sequences, other=1) == 0:
        return
    row_limit = tl.minimum(tl.load(limits + 1), capacity)
    sampled_limit = tl.minimum(tl.load(limits + 2), sampled_capacity)
    step = tl.load(turn)
    rows = tl.load(counts + index, mask=known, other=0)
    samples = tl.load(counts + sequences + index, mask=known, other=0)
    first = (step % sequences).to(tl.int32)
    fits = admitted(rows, index, first, row_limit) & admitted(samples, index, first, sampled_limit)
    kept_rows, kept_samples = tl.where(fits, rows, 0), tl.where(fits, samples, 0)
    if sequence >= sequences:
        if sequence == sequences:
            waits = tl.load(counts + 2 * sequences + index, mask=known, other=0)
            store_starts(start, kept_rows, index, sequences)
            store_starts(sampled_start, kept_samples, index, sequences)
            tell(totals, step, 1, tl.sum(rows, 0))
            tell(totals, step, 2, tl.sum(samples, 0))
            tell(totals, step, 3, tl.sum(waits + ((rows > 0) & (fits == 0)).to(tl.int32), 0))
        _clean((sequence - sequences) * CHUNK, tl.sum(kept_rows, 0), tl.sum(kept_samples, 0), row_limit, sampled_limit,
               sequence_of, position_of, position_ids, input_ids, pages, offsets, visible, source, sampled,
               sampled_sequence, sampled_position, CHUNK)
        return

    own = sequence.to(tl.int64)
    row = table + own * stride + 2 * LENGTH
    entered, pending, kept = tl.load(entered_current + own), tl.load(entered_pending + own), tl.load(current_of + own)
    if tl.sum((fits & (index == sequence)).to(tl.int32), 0) == 0:
        kept, pending = kept * 0, pending * 0
        tl.store(current_of + own, kept)
        tl.store(pending_of + own, pending)
        tl.store(rightmost + own, kept - 1)
    lane = tl.arange(0, LANES)
    position = lane - LENGTH
    stays = lanes(pending, kept, lane, LENGTH)
    chosen = lanes(pending * 0, kept & tl.load(row + MASKED), lane, LENGTH)
    before = tl.sum(tl.where(index < sequence, kept_rows, 0), 0)
    at = before + tl.cumsum(stays.to(tl.int32), 0) - 1
    parent = tl.load(entered_start + own) + tl.cumsum(lanes(pending, entered, lane, LENGTH).to(tl.int64), 0) - 1
    history = tl.load(row + HISTORY)
    right = tl.max(tl.where(stays, position, -1), 0)
    last = right if REFERENCE else tl.maximum(right, tl.load(row + PROGRESS))
    tl.store(sequence_of + at, own, mask=stays)
    tl.store(position_of + at, position.to(tl.int64), mask=stays)
    tl.store(position_ids + at, tl.load(entered_position_ids + parent, mask=stays, other=0), mask=stays)
    tl.store(input_ids + at, tl.load(entered_input_ids + parent, mask=stays, other=0), mask=stays)
    tl.store(pages + at, tl.load(entered_pages + parent, mask=stays, other=0), mask=stays)
    tl.store(offsets + at, tl.load(entered_offsets + parent, mask=stays, other=0), mask=stays)
    tl.store(visible + at, tl.where(position < 0, history, history + last + 1), mask=stays)
    tl.store(source + at, parent, mask=stays)
    list_rows(candidates + own * LENGTH, chosen, at, position, LENGTH)
    samples_before = tl.sum(tl.where(index < sequence, kept_samples, 0), 0)
    sample = samples_before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(sampled + sample, at.to(tl.int64), mask=chosen)
    tl.store(sampled_sequence + sample, own, mask=chosen)
    tl.store(sampled_position + sample, position.to(tl.int64), mask=chosen)


def plan(first: Tensor, second: Tensor, table: Tensor, entered: Rows, pace: Pace, length: int, keep: int | None = None,
         selection: str = 'top', sequential: int = 0, kv_visible: str = 'progress', out: Plan | None = None) -> Plan:
    """Budget, selection and compaction of a step (FOCUS, section 3.3 and 3.4, eq. 5).

    Decided tokens and the rows of finished blocks always stay. Sequences that do not fit wait, as in `enter`. What a
    sequence keeps depends on its own values alone.

    Args:
        first, second: [S, Hkv, L] float32, partial importance in layers 0 and 1 of the j-th masked token that entered.
        table: [S, state_width(L)] int64, the state that `enter` saw; rows contiguous, any distance apart.
        entered: the rows of `enter`.
        pace: limits and turn of the step; its totals are told how many rows wanted to be kept, how many to be sampled
            and how many sequences wait, since `enter` or from here on. Never more rows stay than `out` has room for.
        length: L, at most 64.
        keep: a fixed budget instead of alpha's, which also leaves out the paper's two rules on the ranking.
        selection: 'top' is the paper's; 'bottom' and 'random' are its ablations.
        sequential: the next this many masked positions are always kept (sequential unmasking).
        kv_visible: 'progress' or 'reference'.
        out: where to write, apart from all other arguments; None makes room for as many rows as `entered` has.

    Raises:
        ValueError: an argument that the kernels cannot take, or an unknown option.
    """
    expect_state(table, length, pace)
    sequences = table.size(0)
    expect_rows('entered', entered, sequences, length)
    for name, partial in {'first': first, 'second': second}.items():
        if partial.ndim != 3:
            raise ValueError(f'{name} is {tuple(partial.shape)}: the kernel takes [S, Hkv, L]')
        expect(name, partial, (sequences, first.size(1), length), torch.float32)
    _expect_options(keep, selection, sequential, kv_visible)
    if out is None:
        out = Plan.empty(sequences, length, entered.sequence.numel(), table.device)
    expect_rows('out', out, sequences, length)
    counts = torch.empty((3, sequences), dtype=torch.int32, device=table.device)
    capacity, sampled_capacity = out.sequence.numel(), out.sampled.numel()
    full = -1 if length == 64 else (1 << length) - 1
    _keep_kernel[(sequences,)](
        first, second, table, table.stride(0), entered.current, entered.pending, length if keep is None else keep,
        out.current, out.pending, out.rightmost, out.candidates, counts, KV_HEADS=first.size(1),
        LENGTH=length, FULL=full, BLOCK=triton.next_power_of_2(length), RANKING=_RANKINGS[selection],
        FIXED=keep is not None, SEQUENTIAL=sequential, num_warps=4 if length > 16 else 1)
    _rows_kernel[(sequences + max(1, triton.cdiv(max(capacity, sampled_capacity), CHUNK)),)](
        table, table.stride(0), counts, pace.limits, pace.turn, pace.totals, entered.current, entered.pending,
        entered.start, entered.position_ids, entered.input_ids, entered.pages, entered.offsets, out.start,
        out.sequence, out.position, out.position_ids, out.input_ids, out.pages, out.offsets, out.visible, out.current,
        out.pending, out.candidates, out.source, out.rightmost, out.sampled, out.sampled_sequence,
        out.sampled_position, out.sampled_start, sequences, capacity, sampled_capacity, LENGTH=length,
        LANES=triton.next_power_of_2(2 * length), SEQUENCES=triton.next_power_of_2(sequences), CHUNK=CHUNK,
        REFERENCE=kv_visible == 'reference', num_warps=4)
    return out


def _expect_options(keep: int | None, selection: str, sequential: int, kv_visible: str) -> None:
    """Refuse options that do not exist."""
    if keep is not None and keep < 1:
        raise ValueError(f'keep={keep}: at least 1')
    if selection not in _RANKINGS:
        raise ValueError(f'selection={selection!r} is not one of {", ".join(_RANKINGS)}')
    if sequential < 0:
        raise ValueError(f'sequential={sequential}: at least 0')
    expect_visible(kv_visible)
