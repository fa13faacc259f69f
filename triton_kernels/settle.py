"""From sampled tokens to the next step's inputs in one launch; twin: `reference_settle.settle` (FOCUS, section 3.5)."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from .reference_settle import Blocks, Settled

__all__ = ['Blocks', 'Settled', 'settle']

_STRATEGIES = {'low_confidence_dynamic': 0, 'low_confidence_static': 1, 'sequential': 2}
_CACHES = {'delayed-neighbour': 0, 'delayed': 1, 'off': 2}


@triton.jit
def _lanes(bits, place, inside):
    """A map as one flag a lane."""
    return (((bits >> place) & 1) != 0) & inside


@triton.jit
def _map(flags, place):
    """The inverse of `_lanes`."""
    return tl.sum(flags.to(tl.int64) << place, 0)


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
def _first_stop(ids, text, inside, place, output_start, words, width, LENGTH: tl.constexpr):
    """Block position of the first stop word among the generated tokens, L if there is none."""
    hit = place < 0
    for column in range(width):
        hit = hit | (ids == tl.load(words + column))
    return tl.min(tl.where(hit & inside & (text >= output_start), place, LENGTH), 0)


@triton.jit
def _settle_kernel(ids, masked, cached, uncached, progress, decoded, steps, history, appendable, random_offsets,
                   entering, kept, sampled_start, rightmost, tokens, scores, threshold, output_start, stop_words, width,
                   mask_token, next_ids, next_masked, next_cached, next_uncached, next_progress, next_decoded,
                   next_steps, next_history, next_appendable, next_offsets, out_ids, out_mask, out_stopped,
                   out_stop_pos, out_newly, out_entered, out_kept, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
                   STRATEGY: tl.constexpr, PER_STEP: tl.constexpr, CACHE: tl.constexpr, WORDS: tl.constexpr):
    """One program a sequence. All loads come before the barrier and all stores after it: `next` may be the input."""
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    block = sequence * LENGTH + place
    old_ids = tl.load(ids + block, mask=inside, other=0)
    entered, ran, waits = tl.load(entering + sequence), tl.load(kept + sequence), tl.load(masked + sequence)
    waiting = _lanes(waits, place, inside)
    held = _lanes(tl.load(cached + sequence), place, inside)
    live = entered != 0

    candidate = _lanes(ran & waits, place, inside)
    at = tl.load(sampled_start + sequence) + tl.cumsum(candidate.to(tl.int64), 0) - 1
    score = tl.load(scores + at, mask=candidate, other=0.0)
    accepted = _accept(waiting, candidate, score, place, tl.load(threshold + sequence), PER_STEP, STRATEGY)
    new_ids = tl.where(accepted, tl.load(tokens + at, mask=accepted, other=0), old_ids)
    commit = live & (tl.sum((waiting | held).to(tl.int32), 0) == 0)
    still = waiting & (accepted == 0)
    held = (held | commit) & inside
    again = live & (tl.sum(held.to(tl.int32), 0) == LENGTH)
    newly = tl.sum(accepted.to(tl.int64), 0)

    complete = live & (tl.sum((still | held).to(tl.int32), 0) == 0)
    past = tl.load(history + sequence)
    remaining = tl.load(appendable + sequence) - tl.where(complete, LENGTH, 0)
    stopped = remaining <= 0
    stop_pos = LENGTH - 1 + tl.minimum(remaining, 0)
    if WORDS:
        first = _first_stop(new_ids, past + place, inside, place, tl.load(output_start + sequence),
                            stop_words + sequence * width, width, LENGTH)
        ends = complete & (first < LENGTH)
        stop_pos = tl.where(ends, tl.minimum(stop_pos, first), stop_pos)
        stopped = stopped | ends
        remaining = tl.where(ends, tl.minimum(remaining, 0), remaining)

    final = inside & (waiting == 0)
    if CACHE == 0:  # two shifts: by 64 at once is undefined
        final = final & ((place == LENGTH - 1) | ((((waits >> place) >> 1) & 1) == 0))
    pending = tl.load(uncached + sequence)
    if CACHE != 2:
        pending = tl.where(live, pending & ~_map(final, place), pending)
    done = tl.load(progress + sequence)
    done = tl.where(live, tl.maximum(done, tl.load(rightmost + sequence)), done)
    total, count = tl.load(decoded + sequence) + newly, tl.load(steps + sequence) + (newly > 0).to(tl.int64)
    offset = tl.load(random_offsets + sequence) + live.to(tl.int64)
    tl.debug_barrier()

    tl.store(out_ids + block, new_ids, mask=inside)
    tl.store(out_mask + block, tl.where(held, 2, tl.where(still, 0, 1)).to(tl.uint8), mask=inside)
    tl.store(out_stopped + sequence, stopped & live)
    tl.store(out_stop_pos + sequence, stop_pos)
    tl.store(out_newly + sequence, newly)
    tl.store(out_entered + sequence, tl.sum(_lanes(entered, place, inside).to(tl.int64), 0))
    tl.store(out_kept + sequence, tl.sum(_lanes(ran, place, inside).to(tl.int64), 0))
    tl.store(next_ids + block, tl.where(again | (still & live), mask_token, new_ids), mask=inside)
    tl.store(next_masked + sequence, _map((still | again) & inside, place))
    tl.store(next_cached + sequence, tl.where(again, 0, _map(held, place)))
    tl.store(next_uncached + sequence, tl.where(again, -1, pending))
    tl.store(next_progress + sequence, tl.where(again, -1, done))
    tl.store(next_decoded + sequence, tl.where(again, 0, total))
    tl.store(next_steps + sequence, tl.where(again, 0, count))
    tl.store(next_history + sequence, past + tl.where(again, LENGTH, 0))
    tl.store(next_appendable + sequence, remaining)
    tl.store(next_offsets + sequence, offset)


def settle(blocks: Blocks, entering: Tensor, kept: Tensor, sampled_start: Tensor, rightmost: Tensor, tokens: Tensor,
           scores: Tensor, threshold: Tensor, output_start: Tensor, stop_words: Tensor | None, mask_token: int,
           strategy: str = 'low_confidence_dynamic', tokens_per_step: int = 1, cache: str = 'delayed-neighbour',
           out: Settled | None = None) -> Settled:
    """Unmasking, commit, delayed cache, stops and the next block (FOCUS, section 3.5).

    A sequence that entered no row, as in a padded batch, stays as it is.

    Args:
        blocks: before the step.
        entering, kept: [S] maps of the positions that entered the step and that ran all layers.
        sampled_start: [S + 1] int64, first sampled row of each sequence: its kept masked positions, in order.
        rightmost: [S] int64, largest kept position.
        tokens: [R] int64 sampled tokens; R may be more than there are.
        scores: [R] float32, their confidence; NaN ranks last.
        threshold: [S] float32, of 'low_confidence_dynamic'.
        output_start: [S] int64, text position of the first generated token.
        stop_words: [S, W] int64, -1 beyond the end of a row's list; None without stop words.
        mask_token: what undecided positions hold.
        strategy: 'low_confidence_dynamic', 'low_confidence_static' or 'sequential'.
        tokens_per_step: positions that the other two strategies decide.
        cache: 'delayed-neighbour', 'delayed' or 'off'.
        out: where to write; its `next` may be `blocks`.

    Raises:
        ValueError: an argument that the kernel cannot take, or an unknown option.
    """
    sequences, length = blocks.ids.shape
    if not 1 <= length <= 64:
        raise ValueError(f'blocks.ids.size(1)={length}: settle takes block lengths from 1 to 64')
    if strategy not in _STRATEGIES:
        raise ValueError(f'strategy={strategy!r} is not one of {", ".join(_STRATEGIES)}')
    if cache not in _CACHES:
        raise ValueError(f'cache={cache!r} is not one of {", ".join(_CACHES)}')
    if tokens_per_step < 1:
        raise ValueError(f'tokens_per_step={tokens_per_step}: at least 1')
    before = _tensors(blocks)
    for name, tensor in before.items():
        expect(f'blocks.{name}', tensor, (sequences, length) if name == 'ids' else (sequences,), torch.int64)
    for name, tensor in {'entering': entering, 'kept': kept, 'rightmost': rightmost,
                         'output_start': output_start}.items():
        expect(name, tensor, (sequences,), torch.int64)
    expect('sampled_start', sampled_start, (sequences + 1,), torch.int64)
    expect('threshold', threshold, (sequences,), torch.float32)
    expect('tokens', tokens, (tokens.numel(),), torch.int64)
    expect('scores', scores, (tokens.numel(),), torch.float32)
    width = 0
    if stop_words is not None:
        width = stop_words.size(-1)
        expect('stop_words', stop_words, (sequences, width), torch.int64)
    if out is None:
        out = Settled.empty(sequences, length, blocks.ids.device)
    elif out.ids.shape != (sequences, length):
        raise ValueError(f'out is of {tuple(out.ids.shape)}: these blocks are {(sequences, length)}')
    if sequences:
        # one warp: every load of a program is then behind it before its first store, whatever `next` is
        _settle_kernel[(sequences,)](
            *before.values(), entering, kept, sampled_start, rightmost, tokens, scores, threshold, output_start,
            stop_words, width, mask_token, *_tensors(out.next).values(), out.ids, out.mask, out.stopped, out.stop_pos,
            out.newly, out.entered, out.kept, LENGTH=length, BLOCK=triton.next_power_of_2(length),
            STRATEGY=_STRATEGIES[strategy], PER_STEP=tokens_per_step, CACHE=_CACHES[cache],
            WORDS=stop_words is not None, num_warps=1)
    return out


def _tensors(blocks: Blocks) -> dict[str, Tensor]:
    """Its fields by name, in their order."""
    return dict(vars(blocks))
