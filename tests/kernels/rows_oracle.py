"""`enter` and `plan` once more, slowly: one sequence at a time in plain Python, after `tests/oracle.py`."""
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from lmdeploy_focus.kernels.layout import FIELDS
from torch import Tensor

from .. import oracle


@dataclass
class Row:
    """One row of a step."""
    sequence: int
    position: int
    position_ids: int
    input_ids: int
    pages: int
    offsets: int
    visible: int
    masked: bool
    source: int = -1


@dataclass
class Step:
    """What a step runs, by sequence; those that wait run nothing.

    Attributes:
        rows: of each sequence.
        wanted, sampled_wanted: rows of all sequences that were ready, whether they fitted or not.
        waiting: sequences that were ready and do not run.
    """
    rows: list[list[Row]]
    wanted: int = 0
    sampled_wanted: int = 0
    waiting: set[int] = field(default_factory=set)

    def numbered(self) -> list[Row]:
        """All rows in order."""
        return [row for rows in self.rows for row in rows]

    def expect(self, result: Any, length: int, names: Sequence[str], limit: int) -> None:
        """Compare the tensors that rows and plans have in common; `names` are those with an entry a row."""
        rows = self.numbered()
        for name in names:
            padding = -1 if name == 'pages' else 0
            expected = [getattr(row, name) for row in rows] + [padding] * (limit - len(rows))
            assert getattr(result, name)[:limit].tolist() == expected, name
        starts, candidates, current, pending = [0], [], [], []
        for own in self.rows:
            masked = [starts[-1] + i for i, row in enumerate(own) if row.masked]
            starts.append(starts[-1] + len(own))
            candidates.append(masked + [-1] * (length - len(masked)))
            current.append(_signed(sum(1 << row.position for row in own if row.position >= 0)))
            pending.append(_signed(sum(1 << (row.position + length) for row in own if row.position < 0)))
        for name, values in {'start': starts, 'candidates': candidates, 'current': current, 'pending': pending}.items():
            assert getattr(result, name).tolist() == values, name


def read(table: Tensor, length: int) -> list[dict[str, Any]]:
    """The sequences of a table: token ids, sets of positions for the maps, numbers for all else."""
    sequences = []
    for row in table.tolist():
        own: dict[str, Any] = {name: row[2 * length + i] for i, name in enumerate(FIELDS)}
        own |= {name: {p for p in range(length) if own[name] >> p & 1} for name in ('masked', 'uncached', 'pending')}
        own |= {'ids': row[:length], 'pending_ids': row[length:2 * length]}
        own['alpha'] = struct.unpack('<d', struct.pack('<q', own['alpha']))[0]
        sequences.append(own)
    return sequences


def enter(table: Tensor, page_table: Tensor, page_size: int, turn: int, length: int, kv_visible: str,
          limit: int) -> Step:
    """Everything that is not cached, unless the step is full."""
    rows = []
    for s, own in enumerate(read(table, length)):
        columns = []
        if own['alive']:
            columns = sorted(p - length for p in own['pending']) + sorted(own['uncached'])
        rows.append([_row(s, own, p, page_table, page_size, length) for p in columns])
        _show(rows[-1], own, kv_visible)
    step = Step([[] for _ in rows], wanted=sum(map(len, rows)))
    room = limit
    for s in _order(len(rows), turn):
        room -= len(rows[s])
        if room >= 0:
            step.rows[s] = rows[s]
        elif rows[s]:
            step.waiting.add(s)
    return step


def plan(entered: Step, table: Tensor, deltas: Sequence[Sequence[float]], turn: int, length: int,
         limits: tuple[int, int], keep: int | None = None, selection: str = 'top', sequential: int = 0,
         kv_visible: str = 'progress') -> Step:
    """Which of the entered rows stay; `deltas` of each sequence's masked ones, in order."""
    place = {id(row): i for i, row in enumerate(entered.numbered())}
    rows = []
    for own, entering, delta in zip(read(table, length), entered.rows, deltas, strict=True):
        masked = [row.position for row in entering if row.masked]
        assert len(masked) == len(delta)
        allowed = len(masked)
        if keep is not None:
            allowed = min(keep, allowed)
        elif masked:
            allowed = oracle.budget(allowed, own['decoded'], own['steps'], Fraction(str(own['alpha'])))
        if selection == 'bottom':
            delta = [-value for value in delta]
        if selection == 'random':
            delta = [_noise(own['history'] + p, len(masked)) for p in masked]
        stays = oracle.select(delta, masked, allowed, own['progress'], selection == 'top' and keep is None)
        kept = {p for i, (p, stay) in enumerate(zip(masked, stays, strict=True)) if stay or i < sequential}
        rows.append([Row(**vars(row) | {'source': place[id(row)]}) for row in entering
                     if not row.masked or row.position in kept])
        _show(rows[-1], own, kv_visible)
    samples = [sum(row.masked for row in own) for own in rows]
    step = Step([[] for _ in rows], sum(map(len, rows)), sum(samples), set(entered.waiting))
    room, sampled_room = limits
    for s in _order(len(rows), turn):
        room -= len(rows[s])
        sampled_room -= samples[s]
        if room >= 0 and sampled_room >= 0:
            step.rows[s] = rows[s]
        elif rows[s]:
            step.waiting.add(s)
    return step


def _order(sequences: int, turn: int) -> list[int]:
    first = turn % sequences
    return [*range(first, sequences), *range(first)]


def _row(sequence: int, own: dict[str, Any], position: int, page_table: Tensor, page_size: int, length: int) -> Row:
    text = own['history'] + position
    token = own['ids'][position] if position >= 0 else own['pending_ids'][length + position]
    return Row(sequence, position, text, token, int(page_table[sequence, text // page_size]), text % page_size, 0,
               position in own['masked'])


def _show(rows: list[Row], own: dict[str, Any], kv_visible: str) -> None:
    """How many keys each row of a sequence sees."""
    rightmost = max((row.position for row in rows), default=-1)
    for row in rows:
        row.visible = (own['history'] if row.position < 0 else
                       oracle.visible(own['history'], rightmost, own['progress'], kv_visible))


def _noise(text: int, masked: int) -> float:
    """Two rounds of a 32-bit hash of a place in the text and the number of masked tokens, rounded to float32."""
    value = (text * 64 + masked) % 2**32
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        value = (value ^ value >> 16) * factor % 2**32
    return struct.unpack('<f', struct.pack('<f', value ^ value >> 16))[0]


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
