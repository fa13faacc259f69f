"""Twin of `plan`: all that lies between importance and the suffix, in plain torch."""
import torch
from torch import Tensor

from .layout import TURNS, Pace, Plan, Rows, pack_bits, state_columns, unpack_bits
from .reference import budget, select
from .reference_enter import admitted, bound, fill, last_visible, listed, places, rightmost_of, starts

__all__ = ['plan']

# multipliers of a 32-bit multiply-and-shift hash
_MIX = (0x85EBCA6B, 0xC2B2AE35)


def plan(first: Tensor, second: Tensor, table: Tensor, entered: Rows, pace: Pace, length: int, keep: int | None = None,
         selection: str = 'top', sequential: int = 0, kv_visible: str = 'progress', out: Plan | None = None) -> Plan:
    """Budget, selection and compaction of a step (FOCUS, section 3.3 and 3.4, eq. 5).

    Decided tokens and the rows of finished blocks always stay. Sequences that do not fit wait, as in `enter`.

    Args:
        first, second: [S, Hkv, L] float32, partial importance in layers 0 and 1 of the j-th masked token that entered.
        table: [S, state_width(L)] int64, the state that `enter` saw.
        entered: the rows of `enter`.
        pace: limits and turn of the step; its totals are told how many rows wanted to be kept, how many to be sampled
            and how many sequences wait, since `enter` or from here on.
        length: L.
        keep: a fixed budget instead of alpha's, which also leaves out the paper's two rules on the ranking.
        selection: 'top' is the paper's; 'bottom' and 'random' are its ablations.
        sequential: the next this many masked positions are always kept (sequential unmasking).
        kv_visible: 'progress' or 'reference'.
        out: where to write; None makes room for as many rows as `entered` has.
    """
    state = state_columns(table, length)
    if out is None:
        out = Plan.empty(table.size(0), length, entered.sequence.size(0), table.device)
    pending, current = unpack_bits(entered.pending, length), unpack_bits(entered.current, length)
    waiting = unpack_bits(state.masked, length) & current
    kept = (current & ~waiting) | _kept_masked(first, second, waiting, table, length, keep, selection, sequential)
    numbers_before = places(torch.cat([pending, current], 1))[2]
    rows, sampled = torch.cat([pending, kept], 1), kept & waiting

    limit, sampled_limit = bound(pace, 1, out.sequence), bound(pace, 2, out.sampled)
    wanted, sampled_wanted = rows.sum(1), sampled.sum(1)
    fits = admitted(wanted, pace.turn, limit) & admitted(sampled_wanted, pace.turn, sampled_limit)
    rows, sampled = rows & fits[:, None], sampled & fits[:, None]
    pending, kept = rows.split(length, 1)

    sequence, position, numbers = places(rows)
    source = numbers_before[rows]
    rightmost = rightmost_of(kept)
    history = state.history[sequence]
    last = last_visible(rightmost, state.progress, kv_visible)
    fill(out.sequence, sequence, limit)
    fill(out.position, position, limit)
    fill(out.position_ids, entered.position_ids[source], limit)
    fill(out.input_ids, entered.input_ids[source], limit)
    fill(out.pages, entered.pages[source], limit, padding=-1)
    fill(out.offsets, entered.offsets[source], limit)
    fill(out.visible, torch.where(position < 0, history, history + last[sequence] + 1), limit)
    fill(out.source, source, limit)
    out.start.copy_(starts(rows.sum(1)))
    out.current.copy_(pack_bits(kept))
    out.pending.copy_(pack_bits(pending))
    out.rightmost.copy_(rightmost)
    out.candidates.copy_(listed(numbers[:, length:], sampled))

    sampled_sequence, sampled_position = sampled.nonzero(as_tuple=True)
    fill(out.sampled, numbers[:, length:][sampled], sampled_limit)
    fill(out.sampled_sequence, sampled_sequence, sampled_limit)
    fill(out.sampled_position, sampled_position, sampled_limit)
    out.sampled_start.copy_(starts(sampled.sum(1)))

    ready = (state.alive != 0) & (unpack_bits(state.uncached, length) | unpack_bits(state.pending, length)).any(1)
    told = pace.totals[int(pace.turn) % TURNS]
    told[1] = wanted.sum()
    told[2] = sampled_wanted.sum()
    told[3] = (ready & ~rows.any(1)).sum()
    return out


def _kept_masked(first: Tensor, second: Tensor, waiting: Tensor, table: Tensor, length: int, keep: int | None,
                 selection: str, sequential: int) -> Tensor:
    """The masked positions that stay, [S, L] bool, of those that entered, `waiting` [S, L] bool."""
    state = state_columns(table, length)
    place = torch.arange(length, device=table.device)
    count = waiting.sum(1, keepdim=True)
    delta = torch.zeros_like(first[:, 0])
    before = torch.zeros_like(delta)
    for head in range(first.size(1)):  # a fixed order: the same partial sums give the same delta in any batch
        delta, before = delta + second[:, head], before + first[:, head]
    delta = delta - before
    order = (~waiting).long().argsort(dim=1, stable=True)  # masked positions first
    positions = torch.where(place < count, order, -1)
    budgets = (count[:, 0].clamp_max(keep) if keep is not None
               else budget(count[:, 0], state.decoded, state.steps, state.alpha))
    scores = {'top': lambda: delta, 'bottom': lambda: -delta,
              'random': lambda: _noise(state.history, positions)}[selection]()
    stays = select(scores, positions, budgets, state.progress, paper_rules=selection == 'top' and keep is None)
    stays[:, :sequential] |= positions[:, :sequential] >= 0
    return torch.zeros_like(waiting).scatter(1, order, stays)


def _noise(history: Tensor, positions: Tensor) -> Tensor:
    """Pseudo-random scores [S, L] of a token's place in the text and the number of masked tokens alone."""
    value = (history[:, None] + positions) * 64 + (positions >= 0).sum(1, keepdim=True)
    value = value & 0xFFFFFFFF
    for factor in _MIX:
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return (value ^ (value >> 16)).float()
