"""Layouts that the kernels of a step share: a sequence's row of state, the rows of a step, a step's report.

Maps are int64 with one bit a block position, L at most 64. Letters as in `lmdeploy_focus.stages.view`.
"""
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

# Columns of a sequence's row behind its 2 L token ids; meanings in `lmdeploy_focus.stages.state.FocusState`.
FIELDS = ('masked', 'uncached', 'pending', 'progress', 'decoded', 'steps', 'history', 'appendable', 'random_offset',
          'output_start', 'alive', 'alpha', 'threshold')
# of these, float64 bit patterns
FLOATS = ('alpha', 'threshold')
# Columns of a report behind its L token ids.
REPORT = ('masked', 'stopped', 'stop_pos', 'newly', 'entered', 'kept', 'evicted', 'ran')
# Steps whose totals stay readable, and what a step tells: rows that wanted to enter, to be kept, to be sampled, and
# sequences that had to wait.
TURNS, TOTALS = 4, 4


def pack_bits(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64, bit i is position i."""
    return (flags.long() << torch.arange(flags.size(1), device=flags.device)).sum(1)


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """[S] int64 -> [S, length] bool, the inverse of :func:`pack_bits`."""
    return ((bits[:, None] >> torch.arange(length, device=bits.device)) & 1).bool()


def state_width(length: int) -> int:
    """Columns of a state table for blocks of L."""
    return 2 * length + len(FIELDS)


def report_width(length: int) -> int:
    """Columns of a report for blocks of L."""
    return length + len(REPORT)


def state_columns(table: Tensor, length: int) -> SimpleNamespace:
    """Views of a state table [S, state_width(L)] int64: ids and pending_ids [S, L], all others [S]; FLOATS float64."""
    columns = {name: table[:, 2 * length + index] for index, name in enumerate(FIELDS)}
    for name in FLOATS:
        index = 2 * length + FIELDS.index(name)
        columns[name] = table[:, index:index + 1].view(torch.float64)[:, 0]
    return SimpleNamespace(ids=table[:, :length], pending_ids=table[:, length:2 * length], **columns)


def report_columns(report: Tensor, length: int) -> SimpleNamespace:
    """Views of a report [S, report_width(L)] int64: ids [S, L], all others [S]."""
    return SimpleNamespace(ids=report[:, :length],
                           **{name: report[:, length + index] for index, name in enumerate(REPORT)})


_Rows = TypeVar('_Rows', bound='Rows')


@dataclass
class Rows:
    """Rows of a step in buffers of C; those of a sequence are contiguous, its finished block's first, in text order.

    A finished block (`pending` in the state) is committed beside the first step of the next one. Beyond the rows there
    are, up to the step's limit, `pages` is -1 and everything else 0; beyond the limit anything.

    Attributes:
        start: [S + 1] int64, first row of each sequence; its last value is the number of rows.
        sequence: [C] int64.
        position: [C] int64, block position; negative in a finished block: its position minus L.
        position_ids: [C] int64, position in the text.
        input_ids: [C] int64, tokens.
        pages, offsets: [C] int64, where the KV of a row is stored.
        visible: [C] int64, number of keys that a row sees.
        current, pending: [S] maps of the positions that these rows are, in the block and in the finished one.
        candidates: [S, L] int64, row of a sequence's j-th masked position, -1 beyond the last.
    """
    start: Tensor
    sequence: Tensor
    position: Tensor
    position_ids: Tensor
    input_ids: Tensor
    pages: Tensor
    offsets: Tensor
    visible: Tensor
    current: Tensor
    pending: Tensor
    candidates: Tensor

    @classmethod
    def empty(cls: type[_Rows], sequences: int, length: int, capacity: int, device: torch.device | str) -> _Rows:
        """Room for C rows, zeroed; pages -1."""
        shapes: dict[str, tuple[int, ...]] = {'start': (sequences + 1,), 'current': (sequences,),
                                              'pending': (sequences,), 'candidates': (sequences, length),
                                              'rightmost': (sequences,), 'sampled_start': (sequences + 1,)}
        rows = cls(**{f.name: torch.zeros(shapes.get(f.name, (capacity,)), dtype=torch.int64, device=device)
                      for f in fields(cls)})
        rows.pages.fill_(-1)
        return rows


@dataclass
class Plan(Rows):
    """The rows that a step keeps, and those of them that are sampled: R masked ones.

    Attributes:
        source: [C] int64, index of each kept row among the entered ones.
        rightmost: [S] int64, largest kept position of the block, -1 for a sequence that does not run.
        sampled: [C] int64, indices of the masked rows among the kept ones.
        sampled_sequence, sampled_position: [C] int64 of each.
        sampled_start: [S + 1] int64, first sampled row of each sequence; its last value is R.
    """
    source: Tensor
    rightmost: Tensor
    sampled: Tensor
    sampled_sequence: Tensor
    sampled_position: Tensor
    sampled_start: Tensor


@dataclass
class Pace:
    """What the host tells the step and is told by it.

    Attributes:
        limits: [3] int64 on the device: most rows that enter, that are kept, that are sampled. Sequences that do not
            fit wait for the next step, whole: what a sequence keeps never depends on its company.
        turn: [1] int64 on the device, number of the step; decides which sequences come first.
        totals: [TURNS, TOTALS] int32, pinned host memory on a GPU; row turn % TURNS is this step's.
    """
    limits: Tensor
    turn: Tensor
    totals: Tensor

    @classmethod
    def unlimited(cls, device: torch.device | str) -> 'Pace':
        """No sequence waits."""
        return cls(torch.full((3,), 2**31 - 1, dtype=torch.int64, device=device),
                   torch.zeros(1, dtype=torch.int64, device=device),
                   torch.zeros((TURNS, TOTALS), dtype=torch.int32, pin_memory=torch.device(device).type == 'cuda'))
