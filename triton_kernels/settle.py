"""From sampled tokens to the next step's state in one launch; twin: `reference_settle.settle` (FOCUS, section 3.5)."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from ._rows import (
    ALIVE,
    APPENDABLE,
    DECODED,
    HISTORY,
    MASKED,
    OUTPUT_START,
    PENDING,
    PROGRESS,
    RANDOM_OFFSET,
    STEPS,
    THRESHOLD,
    UNCACHED,
)
from .layout import REPORT, Pace, Plan, Rows, report_width, state_width

__all__ = ['settle']

_STRATEGIES = {'low_confidence_dynamic': 0, 'low_confidence_static': 1, 'sequential': 2}
_CACHES = {'delayed-neighbour': 0, 'delayed': 1, 'off': 2}
# columns of a report behind its ids
_TOLD_MASKED, _TOLD_STOPPED, _TOLD_STOP_POS, _TOLD_NEWLY, _TOLD_ENTERED, _TOLD_KEPT, _TOLD_EVICTED, _TOLD_RAN = (
    tl.constexpr(REPORT.index(name))
    for name in ('masked', 'stopped', 'stop_pos', 'newly', 'entered', 'kept', 'evicted', 'ran'))


@triton.jit
def _lanes(bits, place, inside):
    """A map as one flag a lane."""
    return (((bits >> place) & 1) != 0) & inside


@triton.jit
def _map(flags, place):
    """The inverse of `_lanes`."""
    return tl.sum(flags.to(tl.int64) << place, 0)


@triton.jit
def _first(flags, place, LENGTH: tl.constexpr):
    """The smallest position with a flag, L if there is none."""
    return tl.min(tl.where(flags, place, LENGTH), 0)


@triton.jit
def _count(current, pending, place, inside):
    """Rows of a sequence: bits of two maps."""
    return tl.sum(_lanes(current, place, inside).to(tl.int64) + _lanes(pending, place, inside).to(tl.int64), 0)


@triton.jit
def _accept(waiting, candidate, score, place, threshold, PER_STEP: tl.constexpr, STRATEGY: tl.constexpr):
    """Which candidates are decided; ties go to the smaller position."""
    # as the twin: what is not a number ranks last, but still before what is no candidate
    score = tl.where(score == score, score, -1.0)
    score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
    score = tl.where(candidate, score, float('-inf'))
    if STRATEGY == 0:
        best = tl.min(tl.where(score == tl.max(score, 0), place, 64), 0)
        accepted = candidate & ((place == best) | (score >= threshold))
    elif STRATEGY == 1:
        better = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None])
                                                      & (place[None, :] < place[:, None]))
        accepted = candidate & (tl.sum(better.to(tl.int32), 1) < PER_STEP)
    else:
        accepted = candidate & (tl.cumsum(waiting.to(tl.int32), 0) <= PER_STEP)
    return accepted


@triton.jit
def _settle_kernel(table, entered_current, entered_pending, current, pending, rightmost, sampled_start, turn, tokens,
                   scores, stop_words, mask_token, report, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
                   WIDTH: tl.constexpr, WORDS: tl.constexpr, STATE: tl.constexpr, REPORT_WIDTH: tl.constexpr,
                   STRATEGY: tl.constexpr, PER_STEP: tl.constexpr, CACHE: tl.constexpr, FULL_COMMIT: tl.constexpr):
    """One program a sequence. All loads of its row come before the barrier and all stores after it."""
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    row = table + sequence * STATE
    field = row + 2 * LENGTH
    old_ids = tl.load(row + place, mask=inside, other=0)
    ran, bits = tl.load(current + sequence), tl.load(field + MASKED)
    live = (ran != 0) & (tl.load(field + ALIVE) != 0)
    waiting = _lanes(bits, place, inside)

    candidate = _lanes(ran & bits, place, inside) & live
    at = tl.load(sampled_start + sequence) + tl.cumsum(candidate.to(tl.int64), 0) - 1
    score = tl.load(scores + at, mask=candidate, other=0.0)
    token = tl.load(tokens + at, mask=candidate, other=0)
    threshold = tl.load(field + THRESHOLD).to(tl.float64, bitcast=True).to(tl.float32)
    accepted = _accept(waiting, candidate, score, place, threshold, PER_STEP, STRATEGY)
    still = waiting & (accepted == 0)
    ids = tl.where(accepted, token, tl.where(still & live, mask_token, old_ids))
    undecided = _first(still, place, LENGTH)
    newly = tl.sum(accepted.to(tl.int64), 0)

    past, allowed = tl.load(field + HISTORY), tl.load(field + APPENDABLE)
    column = tl.arange(0, WORDS)
    words = tl.load(stop_words + sequence * WIDTH + column, mask=column < WIDTH, other=-1)
    hit = tl.sum((ids[:, None] == words[None, :]).to(tl.int32), 1) > 0
    generated = past + place >= tl.load(field + OUTPUT_START)
    first = _first(hit & generated & inside, place, LENGTH)
    word = first < undecided
    cap = allowed <= undecided
    stop_pos = tl.minimum(tl.where(word, first, LENGTH - 1), tl.where(cap, allowed - 1, LENGTH - 1))
    stopped = (word | cap) & live
    rolls = live & (stopped == 0) & (undecided == LENGTH)

    whole = _map(inside, place)
    uncached = tl.load(field + UNCACHED) & whole
    if CACHE != 2:
        final = inside & (waiting == 0)
        if CACHE == 0:  # two shifts: by 64 at once is undefined
            final = final & ((place == LENGTH - 1) | ((((bits >> place) >> 1) & 1) == 0))
        uncached = uncached & ~_map(final, place)
    commit = whole if FULL_COMMIT or CACHE == 2 else uncached
    progress = tl.maximum(tl.load(field + PROGRESS), tl.load(rightmost + sequence))
    decoded = tl.load(field + DECODED) + newly
    steps = tl.load(field + STEPS) + (newly > 0).to(tl.int64)
    offset = tl.load(field + RANDOM_OFFSET)
    wanted = _count(tl.load(entered_current + sequence), tl.load(entered_pending + sequence), place, inside)
    kept = _count(ran, tl.load(pending + sequence), place, inside)
    masked = _map(still, place)
    tl.debug_barrier()

    tl.store(row + place, tl.where(rolls, mask_token, ids), mask=inside & live)
    tl.store(row + LENGTH + place, ids, mask=inside & rolls)
    tl.store(field + MASKED, tl.where(rolls, whole, masked), mask=live)
    tl.store(field + UNCACHED, tl.where(rolls, whole, uncached), mask=live)
    tl.store(field + PENDING, tl.where(rolls, commit, 0), mask=live)
    tl.store(field + PROGRESS, tl.where(rolls, -1, progress), mask=live)
    tl.store(field + DECODED, tl.where(rolls, 0, decoded), mask=live)
    tl.store(field + STEPS, tl.where(rolls, 0, steps), mask=live)
    tl.store(field + HISTORY, past + LENGTH, mask=rolls)
    tl.store(field + APPENDABLE, allowed - LENGTH, mask=rolls)
    tl.store(field + RANDOM_OFFSET, offset + 1, mask=live)
    tl.store(field + ALIVE, 0, mask=stopped)

    told = report + sequence * REPORT_WIDTH
    ran_here = live.to(tl.int64)
    tl.store(told + place, ids, mask=inside)
    told += LENGTH
    tl.store(told + _TOLD_MASKED, tl.where(stopped, 0, masked))
    tl.store(told + _TOLD_STOPPED, stopped.to(tl.int64))
    tl.store(told + _TOLD_STOP_POS, stop_pos * ran_here)
    tl.store(told + _TOLD_NEWLY, newly)
    tl.store(told + _TOLD_ENTERED, wanted * ran_here)
    tl.store(told + _TOLD_KEPT, kept * ran_here)
    tl.store(told + _TOLD_EVICTED, (live & (kept < wanted)).to(tl.int64))
    tl.store(told + _TOLD_RAN, ran_here)
    if sequence == 0:
        tl.store(turn, tl.load(turn) + 1)


def settle(table: Tensor, entered: Rows, plan: Plan, pace: Pace, tokens: Tensor, scores: Tensor, stop_words: Tensor,
           mask_token: int, length: int, strategy: str = 'low_confidence_dynamic', tokens_per_step: int = 1,
           cache: str = 'delayed-neighbour', full_commit: bool = False, report: Tensor | None = None) -> Tensor:
    """Unmasking, delayed cache, stops and the next block (FOCUS, section 3.5), in place.

    A sequence stops as soon as its outcome is certain: a generated stop word, or the length cap, with nothing undecided
    before it. Otherwise a block that is complete becomes the pending one at once. A sequence that does not run, because
    it is not alive or has to wait, stays as it is, and its report tells its ids and masked positions alone.

    Args:
        table: [S, state_width(L)] int64, see `layout.FIELDS`; what it holds of a sequence that stops is only alive = 0.
        entered, plan: of this step.
        pace: its turn goes on by one.
        tokens: [R'] int64 sampled tokens; R' may be more than there are.
        scores: [R'] float32, their confidence; NaN ranks last.
        stop_words: [S, W] int64, -1 beyond the end of a row's list, W at least 1.
        mask_token: what undecided positions hold.
        length: L.
        strategy: 'low_confidence_dynamic', 'low_confidence_static' or 'sequential'.
        tokens_per_step: positions that the other two strategies decide.
        cache: 'delayed-neighbour', 'delayed' or 'off'.
        full_commit: a finished block is run once more as a whole.
        report: [S, report_width(L)] int64, where to write.

    Returns:
        The report, see `layout.REPORT`: ids and masked are those before a next block begins, masked is 0 in a sequence
        that stops; stop_pos is the block position of the last token to emit, negative where none of the block may be.

    Raises:
        ValueError: an argument that the kernel cannot take, or an unknown option.
    """
    sequences = table.size(0)
    _validate(length, strategy, tokens_per_step, cache)
    expect('table', table, (sequences, state_width(length)), torch.int64)
    if not sequences:
        raise ValueError('table has no rows: settle takes at least one sequence')
    for name, rows in {'entered': entered, 'plan': plan}.items():
        for part in ('current', 'pending'):
            expect(f'{name}.{part}', getattr(rows, part), (sequences,), torch.int64)
    expect('plan.rightmost', plan.rightmost, (sequences,), torch.int64)
    expect('plan.sampled_start', plan.sampled_start, (sequences + 1,), torch.int64)
    expect('pace.turn', pace.turn, (1,), torch.int64)
    expect('tokens', tokens, (tokens.numel(),), torch.int64)
    expect('scores', scores, (tokens.numel(),), torch.float32)
    width = stop_words.size(-1)
    expect('stop_words', stop_words, (sequences, width), torch.int64)
    if not width:
        raise ValueError('stop_words has no columns: a sequence without stop words has -1')
    if report is None:
        report = table.new_empty((sequences, report_width(length)))
    expect('report', report, (sequences, report_width(length)), torch.int64)
    # one warp: every load of a program is then behind it before its first store
    _settle_kernel[(sequences,)](
        table, entered.current, entered.pending, plan.current, plan.pending, plan.rightmost, plan.sampled_start,
        pace.turn, tokens, scores, stop_words, mask_token, report, LENGTH=length,
        BLOCK=triton.next_power_of_2(length), WIDTH=width, WORDS=triton.next_power_of_2(width),
        STATE=state_width(length), REPORT_WIDTH=report_width(length), STRATEGY=_STRATEGIES[strategy],
        PER_STEP=tokens_per_step, CACHE=_CACHES[cache], FULL_COMMIT=full_commit, num_warps=1)
    return report


def _validate(length: int, strategy: str, tokens_per_step: int, cache: str) -> None:
    """The options."""
    if not 1 <= length <= 64:
        raise ValueError(f'length={length}: settle takes block lengths from 1 to 64')
    if strategy not in _STRATEGIES:
        raise ValueError(f'strategy={strategy!r} is not one of {", ".join(_STRATEGIES)}')
    if cache not in _CACHES:
        raise ValueError(f'cache={cache!r} is not one of {", ".join(_CACHES)}')
    if tokens_per_step < 1:
        raise ValueError(f'tokens_per_step={tokens_per_step}: at least 1')
