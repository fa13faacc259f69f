"""Twin of `settle`: from sampled tokens to the next step's inputs, in plain torch."""
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ['Blocks', 'Settled', 'settle']

MASKED, UNMASKED, CACHED = 0, 1, 2
_LARGEST = torch.finfo(torch.float32).max


@dataclass
class Blocks:
    """The blocks of S sequences between two steps. Maps are int64 with one bit a block position, L at most 64.

    Attributes:
        ids: [S, L] int64, the mask token where undecided.
        masked, cached: [S] maps of the positions that are MASKED and CACHED; the others are UNMASKED.
        uncached: [S] map of the positions that still enter a step.
        progress, decoded, steps: [S] int64, see `stages.state.FocusState`.
        history: [S] int64, tokens before the block.
        appendable: [S] int64, tokens that may still be appended, counted from the start of the block.
        random_offsets: [S] int64, place in each sequence's random stream.
    """
    ids: Tensor
    masked: Tensor
    cached: Tensor
    uncached: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor
    history: Tensor
    appendable: Tensor
    random_offsets: Tensor

    @classmethod
    def empty(cls, sequences: int, length: int, device: torch.device | str) -> 'Blocks':
        """Room for S blocks of L."""
        return cls(**{f.name: torch.empty((sequences, length) if f.name == 'ids' else (sequences,), dtype=torch.int64,
                                          device=device) for f in fields(cls)})


@dataclass
class Settled:
    """What a step leaves.

    Attributes:
        next: the blocks before the next step.
        ids: [S, L] int64, tokens after unmasking, before a new block replaces a committed one.
        mask: [S, L] uint8, MASKED, UNMASKED or CACHED, likewise.
        stopped: [S] bool, sequences that end with this step.
        stop_pos: [S] int64, block position of the last token to emit.
        newly: [S] int64, positions that this step decoded.
        entered, kept: [S] int64, rows before and after eviction.
    """
    next: Blocks
    ids: Tensor
    mask: Tensor
    stopped: Tensor
    stop_pos: Tensor
    newly: Tensor
    entered: Tensor
    kept: Tensor

    @classmethod
    def empty(cls, sequences: int, length: int, device: torch.device | str) -> 'Settled':
        """Room for what a step of S blocks of L leaves."""
        dtypes = {'mask': torch.uint8, 'stopped': torch.bool}
        shapes = dict.fromkeys(('ids', 'mask'), (sequences, length))
        return cls(next=Blocks.empty(sequences, length, device), **{
            f.name: torch.empty(shapes.get(f.name, (sequences,)), dtype=dtypes.get(f.name, torch.int64), device=device)
            for f in fields(cls) if f.name != 'next'})


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
    """
    length = blocks.ids.size(1)
    place = torch.arange(length, device=blocks.ids.device)
    waiting, held, ran = (((flags[:, None] >> place) & 1).bool() for flags in (blocks.masked, blocks.cached, kept))
    live = entering != 0
    accepted, proposed = _accept(waiting, ran & waiting, sampled_start, tokens, scores, threshold, strategy,
                                 tokens_per_step)
    commit = live & ~(waiting | held).any(1)
    ids = torch.where(accepted, proposed, blocks.ids)
    mask = torch.where(waiting & ~accepted, MASKED, torch.where(held | commit[:, None], CACHED, UNMASKED))
    newly = accepted.sum(1)

    remaining, stopped, stop_pos = _stop(ids, live & (mask == UNMASKED).all(1), blocks, output_start, stop_words)
    stopped = stopped & live
    final = ~waiting
    if cache == 'delayed-neighbour':
        final = final & torch.cat([final[:, 1:], torch.ones_like(final[:, :1])], 1)
    frozen = (final.long() << place).sum(1) if cache != 'off' else torch.zeros_like(kept)
    again = live & (mask == CACHED).all(1)
    blank = again[:, None] | ((mask == MASKED) & live[:, None])

    def renewed(value: Tensor, start: int) -> Tensor:
        return torch.where(again, start, value)

    after = Blocks(
        ids=torch.where(blank, mask_token, ids),
        masked=(((mask == MASKED) | again[:, None]).long() << place).sum(1),
        cached=(((mask == CACHED) & ~again[:, None]).long() << place).sum(1),
        uncached=renewed(torch.where(live, blocks.uncached & ~frozen, blocks.uncached), -1),
        progress=renewed(torch.where(live, torch.maximum(blocks.progress, rightmost), blocks.progress), -1),
        decoded=renewed(blocks.decoded + newly, 0),
        steps=renewed(blocks.steps + (newly > 0), 0),
        history=blocks.history + again * length,
        appendable=remaining,
        random_offsets=blocks.random_offsets + live,
    )
    entered = ((entering[:, None] >> place) & 1).sum(1)
    result = Settled(after, ids, mask.to(torch.uint8), stopped, stop_pos, newly, entered, ran.sum(1))
    return result if out is None else _copy(result, out)


def _accept(waiting: Tensor, candidate: Tensor, sampled_start: Tensor, tokens: Tensor, scores: Tensor,
            threshold: Tensor, strategy: str, tokens_per_step: int) -> tuple[Tensor, Tensor]:
    """Positions that are decided and the tokens proposed for all candidates, [S, L] each."""
    at = (sampled_start[:-1, None] + candidate.cumsum(1) - 1)[candidate]
    proposed = torch.zeros_like(waiting, dtype=torch.int64)
    proposed[candidate] = tokens[at]
    score = torch.full(waiting.shape, float('-inf'), device=scores.device)
    score[candidate] = scores[at].nan_to_num(nan=-1.0, posinf=_LARGEST, neginf=-_LARGEST)
    if strategy == 'low_confidence_dynamic':
        best = torch.zeros_like(candidate).scatter(1, score.argmax(1, keepdim=True), True)
        return candidate & (best | (score >= threshold[:, None])), proposed
    if strategy == 'low_confidence_static':
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :tokens_per_step]
        return candidate & torch.zeros_like(candidate).scatter(1, order, True), proposed
    if strategy == 'sequential':
        return candidate & (waiting.cumsum(1) <= tokens_per_step), proposed
    raise ValueError(f'strategy={strategy!r} is not one of low_confidence_dynamic, low_confidence_static, sequential')


def _stop(ids: Tensor, complete: Tensor, blocks: Blocks, output_start: Tensor,
          stop_words: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that may still come, which sequences end, and their last position; the earlier of cap and stop word."""
    length = ids.size(1)
    place = torch.arange(length, device=ids.device)
    remaining = blocks.appendable - complete * length
    stopped = remaining <= 0
    stop_pos = length - 1 + remaining.clamp_max(0)
    if stop_words is not None:
        generated = blocks.history[:, None] + place >= output_start[:, None]
        hit = (ids[:, :, None] == stop_words[:, None, :]).any(-1) & generated
        first = torch.where(hit, place, length).amin(1)
        ends = complete & (first < length)
        stop_pos = torch.where(ends, torch.minimum(stop_pos, first), stop_pos)
        stopped = stopped | ends
        remaining = torch.where(ends, remaining.clamp_max(0), remaining)
    return remaining, stopped, stop_pos


def _copy(result: Settled, out: Settled) -> Settled:
    """The values of `result` in the tensors of `out`."""
    for f in fields(Blocks):
        getattr(out.next, f.name).copy_(getattr(result.next, f.name))
    for f in fields(Settled):
        if f.name != 'next':
            getattr(out, f.name).copy_(getattr(result, f.name))
    return out
