"""Twin of `enter`: the rows that enter a step, in plain torch."""
import torch
from torch import Tensor

from .layout import TURNS, Pace, Rows, pack_bits, state_columns, unpack_bits

__all__ = ['enter']


def enter(table: Tensor, page_table: Tensor, page_size: int, pace: Pace, length: int, kv_visible: str = 'progress',
          out: Rows | None = None) -> Rows:
    """Which positions enter a step, and their rows (FOCUS, section 3.5).

    Of a sequence that is alive these are the positions of its finished block that are still to be committed, then
    those of its block that are not cached yet. Sequences that do not fit wait; who comes first changes with the turn.

    Args:
        table: [S, state_width(L)] int64, a row of state a sequence.
        page_table: [S, P] int64 or int32.
        page_size: G.
        pace: limits and turn of the step; its totals are told how many rows wanted to enter and how many sequences
            wait.
        length: L.
        kv_visible: 'progress' or 'reference'.
        out: where to write; None makes room for all rows that there may be.
    """
    sequences = table.size(0)
    state = state_columns(table, length)
    if out is None:
        out = Rows.empty(sequences, length, sequences * 2 * length, table.device)
    rows = torch.cat([unpack_bits(state.pending, length), unpack_bits(state.uncached, length)], 1)
    rows = rows & (state.alive != 0)[:, None]
    wanted = rows.sum(1)
    limit = bound(pace, 0, out.sequence)
    fits = admitted(wanted, pace.turn, limit)
    rows = rows & fits[:, None]
    pending, current = rows.split(length, 1)

    sequence, position, numbers = places(rows)
    history = state.history[sequence]
    text = history + position
    token = torch.cat([state.pending_ids, state.ids], 1)[sequence, position + length]
    last = last_visible(rightmost_of(current), state.progress, kv_visible)
    fill(out.sequence, sequence, limit)
    fill(out.position, position, limit)
    fill(out.position_ids, text, limit)
    fill(out.input_ids, token, limit)
    fill(out.pages, page_table[sequence, text // page_size].long(), limit, padding=-1)
    fill(out.offsets, text % page_size, limit)
    fill(out.visible, torch.where(position < 0, history, history + last[sequence] + 1), limit)
    out.start.copy_(starts(rows.sum(1)))
    out.current.copy_(pack_bits(current))
    out.pending.copy_(pack_bits(pending))
    out.candidates.copy_(listed(numbers[:, length:], unpack_bits(state.masked, length) & current))

    told = pace.totals[int(pace.turn) % TURNS]
    told[0] = wanted.sum()
    told[3] = (~fits & (wanted > 0)).sum()
    return out


def bound(pace: Pace, index: int, buffer: Tensor) -> int:
    """A limit of the step: never more than there is room for."""
    return min(int(pace.limits[index]), buffer.size(0))


def admitted(wanted: Tensor, turn: Tensor, limit: int) -> Tensor:
    """Which sequences fit, [S] bool: they take turns in being first, and after one that waits all others wait too.

    Args:
        wanted: [S] rows of each sequence.
        turn: [1] number of the step.
        limit: most rows of all together.
    """
    index = torch.arange(wanted.size(0), device=wanted.device)
    order = (index + turn) % wanted.size(0)
    return torch.zeros_like(wanted, dtype=torch.bool).scatter(0, order, wanted[order].cumsum(0) <= limit)


def places(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence and block position (negative in the finished block) of each row [N], and the row of each column.

    Args:
        rows: [S, 2 L] bool, the columns that are rows: positions of the finished block, then of the current one.
    """
    sequence, column = rows.nonzero(as_tuple=True)
    return sequence, column - rows.size(1) // 2, (rows.flatten().cumsum(0) - 1).view_as(rows)


def rightmost_of(chosen: Tensor) -> Tensor:
    """[S] largest position of each sequence, -1 without any."""
    return torch.where(chosen, torch.arange(chosen.size(1), device=chosen.device), -1).amax(1)


def last_visible(rightmost: Tensor, progress: Tensor, kv_visible: str) -> Tensor:
    """[S] last block position that the rows of a block see."""
    return rightmost if kv_visible == 'reference' else torch.maximum(rightmost, progress)


def listed(numbers: Tensor, chosen: Tensor) -> Tensor:
    """The chosen ones of `numbers` [S, L] first, -1 beyond."""
    order = (~chosen).long().argsort(dim=1, stable=True)
    place = torch.arange(chosen.size(1), device=chosen.device)
    return torch.where(place < chosen.sum(1, keepdim=True), numbers.gather(1, order), -1)


def starts(counts: Tensor) -> Tensor:
    """[S + 1] where each sequence's rows begin."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def fill(buffer: Tensor, values: Tensor, limit: int, padding: int = 0) -> None:
    """Write N values and clean what a longer step may have left behind them, up to the limit."""
    buffer[:values.size(0)] = values
    buffer[values.size(0):limit] = padding
