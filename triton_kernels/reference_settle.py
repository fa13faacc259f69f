"""Twin of `settle`: from sampled tokens to the next step's state, in plain torch."""
from types import SimpleNamespace

import torch
from torch import Tensor

from .layout import Pace, Plan, Rows, pack_bits, report_columns, report_width, state_columns, unpack_bits

__all__ = ['settle']

_LARGEST = torch.finfo(torch.float32).max


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
    """
    state = state_columns(table, length)
    place = torch.arange(length, device=table.device)
    whole = -1 if length == 64 else (1 << length) - 1
    live = (state.alive != 0) & (plan.current != 0)

    waiting = unpack_bits(state.masked, length)
    candidate = unpack_bits(state.masked & plan.current, length) & live[:, None]
    accepted, proposed = _accept(waiting, candidate, plan.sampled_start, tokens, scores, state.threshold, strategy,
                                 tokens_per_step)
    still = waiting & ~accepted
    ids = torch.where(accepted, proposed, state.ids.masked_fill(still & live[:, None], mask_token))
    undecided = torch.where(still, place, length).amin(1)
    stopped, stop_pos = _stop(ids, undecided, state, stop_words)
    stopped = stopped & live
    rolls = live & ~stopped & (undecided == length)
    newly = accepted.sum(1)

    final = ~waiting
    if cache == 'delayed-neighbour':
        final = final & torch.cat([final[:, 1:], torch.ones_like(final[:, :1])], 1)
    uncached = state.uncached & whole
    if cache != 'off':
        uncached = uncached & ~pack_bits(final)
    masked = pack_bits(still)
    report = _report(report, live, ids, masked.masked_fill(stopped, 0), stopped, stop_pos, newly, entered, plan)

    after = {  # of a sequence that runs: in this block, and where the next one begins
        'masked': (masked, whole), 'uncached': (uncached, whole),
        'pending': (torch.zeros_like(masked), whole if full_commit or cache == 'off' else uncached),
        'progress': (torch.maximum(state.progress, plan.rightmost), -1), 'decoded': (state.decoded + newly, 0),
        'steps': (state.steps + (newly > 0), 0), 'history': (state.history, state.history + length),
        'appendable': (state.appendable, state.appendable - length)}
    for name, (here, there) in after.items():
        column = getattr(state, name)
        column.copy_(torch.where(live, torch.where(rolls, there, here), column))
    state.pending_ids.copy_(torch.where(rolls[:, None], ids, state.pending_ids))
    state.ids.copy_(ids.masked_fill(rolls[:, None], mask_token))
    state.random_offset.add_(live)
    state.alive.masked_fill_(stopped, 0)
    pace.turn.add_(1)
    return report


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
        # in float32, as where the threshold is a number: a confidence of just 0.7 reaches 0.7
        return candidate & (best | (score >= threshold[:, None].float())), proposed
    if strategy == 'low_confidence_static':
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :tokens_per_step]
        return candidate & torch.zeros_like(candidate).scatter(1, order, True), proposed
    if strategy == 'sequential':
        return candidate & (waiting.cumsum(1) <= tokens_per_step), proposed
    raise ValueError(f'strategy={strategy!r} is not one of low_confidence_dynamic, low_confidence_static, sequential')


def _stop(ids: Tensor, undecided: Tensor, state: SimpleNamespace, stop_words: Tensor) -> tuple[Tensor, Tensor]:
    """Which sequences end, and their last position: the earlier of stop word and cap, once nothing can precede it.

    `undecided` [S] is the first position that still waits, L if there is none. A mask token that is a stop word lies
    there at the earliest, and ends nothing.
    """
    length = ids.size(1)
    place = torch.arange(length, device=ids.device)
    generated = state.history[:, None] + place >= state.output_start[:, None]
    hit = (ids[:, :, None] == stop_words[:, None, :]).any(-1) & generated
    first = torch.where(hit, place, length).amin(1)
    word = first < undecided
    cap = state.appendable <= undecided
    stop_pos = torch.minimum(torch.where(word, first, length - 1), torch.where(cap, state.appendable - 1, length - 1))
    return word | cap, stop_pos


def _report(report: Tensor | None, live: Tensor, ids: Tensor, masked: Tensor, stopped: Tensor, stop_pos: Tensor,
            newly: Tensor, entered: Rows, plan: Plan) -> Tensor:
    """Write a step's report, [S, report_width(L)]."""
    sequences, length = ids.shape
    if report is None:
        report = ids.new_empty((sequences, report_width(length)))
    rows, kept = (unpack_bits(part.current, length).sum(1) + unpack_bits(part.pending, length).sum(1)
                  for part in (entered, plan))
    told = report_columns(report, length)
    told.ids.copy_(ids)
    told.masked.copy_(masked)
    values = {'stopped': stopped, 'stop_pos': stop_pos, 'newly': newly, 'entered': rows, 'kept': kept,
              'evicted': kept < rows, 'ran': live}
    for name, value in values.items():
        getattr(told, name).copy_(value * live)
    return report
