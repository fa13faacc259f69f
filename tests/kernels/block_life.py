"""One sequence's blocks in plain Python, sets instead of maps: the golden model of `settle`, and a driver for both."""
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lmdeploy_focus.kernels.layout import (
    FIELDS,
    Pace,
    Plan,
    Rows,
    report_columns,
    report_width,
    state_columns,
    state_width,
)
from torch import Tensor

from .. import oracle
from .settle_checks import MASK_TOKEN, rows_of

Sampled = dict[int, tuple[int, float]]  # position -> token, confidence


@dataclass
class Rules:
    """Options of a run, as settle takes them."""
    length: int
    strategy: str = 'low_confidence_dynamic'
    tokens_per_step: int = 1
    cache: str = 'delayed-neighbour'
    full_commit: bool = False

    def options(self) -> dict[str, Any]:
        """Keyword arguments of settle."""
        return dict(vars(self))


@dataclass
class Life:
    """One sequence.

    Attributes:
        ids: tokens of the block. waiting: its undecided positions.
        history: tokens before it. appendable: tokens that may still be appended, from its start.
        output_start: text position of the first generated token.
        committing: the block before it; pending: those of its positions that still have to be run.
        block: its memory (frozen positions, progress, statistics).
        text: all that was emitted.
    """
    rules: Rules
    ids: list[int]
    waiting: set[int]
    history: int
    appendable: int
    output_start: int
    stop_words: set[int]
    threshold: float
    block: oracle.Block
    committing: list[int]
    pending: set[int] = field(default_factory=set)
    alive: bool = True
    random_offset: int = 0
    text: list[int] = field(default_factory=list)

    def entering(self) -> set[int]:
        """Positions of the block that enter a step."""
        return set(range(self.rules.length)) if self.rules.cache == 'off' else set(self.block.uncached())

    def step(self, entered: set[int], kept: set[int], sampled: Sampled) -> dict[str, Any]:
        """Run `kept` positions and the pending ones; the report."""
        length, rules = self.rules.length, self.rules
        pending = len(self.pending)
        before = [oracle.MASKED if p in self.waiting else oracle.UNMASKED for p in range(length)]
        after = before
        if self.waiting:
            self.ids, after = oracle.unmask(self.ids, before, sampled, rules.strategy, self.threshold,
                                            rules.tokens_per_step)
        self.block.advance(before, after, max(kept))
        newly = len(self.waiting)
        self.waiting = {p for p in range(length) if after[p] == oracle.MASKED}
        newly -= len(self.waiting)
        self.pending = set()
        self.random_offset += 1
        report = {'newly': newly, 'entered': len(entered) + pending, 'kept': len(kept) + pending, 'ran': 1,
                  'evicted': int(kept != entered), 'ids': list(self.ids), 'stopped': 0, 'stop_pos': length - 1}
        end = self.end()
        if end is not None:
            self.alive = False
            self.text += self.ids[:max(end + 1, 0)]
            return report | {'stopped': 1, 'stop_pos': end, 'masked': set()}
        report['masked'] = set(self.waiting)
        if not self.waiting:
            self.begin()
        return report

    def end(self) -> int | None:
        """Last position to emit, once it is certain."""
        for p in range(max(self.rules.length, self.appendable)):
            if p >= self.appendable:
                return self.appendable - 1
            if p >= self.rules.length or p in self.waiting:
                return None
            if self.ids[p] in self.stop_words and self.history + p >= self.output_start:
                return p
        return self.appendable - 1 if self.appendable <= self.rules.length else None

    def begin(self) -> None:
        """The next block; what is not frozen of this one is committed beside its first step."""
        length, rules = self.rules.length, self.rules
        again = rules.full_commit or rules.cache == 'off'
        self.pending = set(range(length)) if again else set(self.block.uncached())
        self.committing, self.ids = self.ids, [MASK_TOKEN] * length
        self.text += self.committing
        self.waiting = set(range(length))
        self.history, self.appendable = self.history + length, self.appendable - length
        self.block = oracle.Block(length, rules.cache)

    def row(self) -> list[int]:
        """Its row of the state table."""
        values = {'masked': bits(self.waiting), 'uncached': bits(self.block.uncached()), 'pending': bits(self.pending),
                  'progress': self.block.progress, 'decoded': self.block.decoded, 'steps': self.block.steps,
                  'history': self.history, 'appendable': self.appendable, 'random_offset': self.random_offset,
                  'output_start': self.output_start, 'alive': int(self.alive), 'alpha': pattern(1.5),
                  'threshold': pattern(self.threshold)}
        return self.ids + self.committing + [values[name] for name in FIELDS]


def bits(positions: set[int] | list[int]) -> int:
    """A map as int64."""
    value = sum(1 << p for p in positions)
    return value - (1 << 64) if value >= 1 << 63 else value


def pattern(value: float) -> int:
    """Of a float64."""
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


@dataclass
class Draws:
    """What a step does to one sequence; the same seed, turn and sequence give the same in every run.

    Attributes:
        vocabulary: number of tokens; where it is small a stop word comes soon.
        bold: share of confident positions.
        waits: share of steps in which a sequence waits, before it enters or after.
    """
    seed: int
    vocabulary: int
    bold: float
    waits: float

    def take(self, life: Life, turn: int, sequence: int) -> tuple[set[int], set[int], Sampled]:
        """Positions that enter, that are kept (none: the sequence waits), and a sample for every position."""
        own = random.Random(f'{self.seed} {turn} {sequence}')
        waits = own.random()
        keep = own.random()
        coins = [own.random() for _ in range(life.rules.length)]
        sampled = {p: (own.randrange(self.vocabulary), self._score(own, life.threshold))
                   for p in range(life.rules.length)}
        if not life.alive or waits < self.waits / 2:
            return set(), set(), sampled
        entered = life.entering()
        if waits < self.waits:
            return entered, set(), sampled
        # a plan always keeps a waiting position, and those that 'sequential' decides next; settle takes any set
        kept = {p for p in entered if p not in life.waiting or coins[p] < keep}
        if own.random() < .8:
            kept |= set(sorted(life.waiting)[:life.rules.tokens_per_step])
        return entered, kept or entered, sampled

    def _score(self, own: random.Random, threshold: float) -> float:
        if own.random() < self.bold:
            return own.choice([threshold, 1.0, .9])
        return own.choice([0.0, .25, .25, math.nan, round(own.random() * 64) / 64])


class Batch:
    """Lives and a state table, stepped together.

    Args:
        lives: of one set of rules.
        settle: kernel or twin.
    """

    def __init__(self, lives: list[Life], settle: Callable[..., Tensor], device: str) -> None:
        self.lives, self.settle, self.rules, self.device = lives, settle, lives[0].rules, device
        self.table = torch.tensor([life.row() for life in lives], device=device)
        assert self.table.size(1) == state_width(self.rules.length)
        self.pace = Pace.unlimited(device)
        width = max(1, *(len(life.stop_words) for life in lives))
        self.stop_words = torch.tensor([sorted(life.stop_words) + [-1] * (width - len(life.stop_words))
                                        for life in lives], device=device)

    def step(self, draws: Draws) -> None:
        """One step of all, compared in every value."""
        turn, length = int(self.pace.turn), self.rules.length
        taken = [draws.take(life, turn, s) for s, life in enumerate(self.lives)]
        rows: list[tuple[int, float]] = []
        start = [0]
        for life, (_, kept, sampled) in zip(self.lives, taken, strict=True):
            rows += [sampled[p] for p in sorted(kept & life.waiting)]
            start.append(len(rows))
        rows += [(min(self.lives[0].stop_words, default=0), 1.0)] * (turn % 3)  # beyond those that were sampled
        came = [bool(entered) for entered, _, _ in taken]
        runs = [bool(kept) for _, kept, _ in taken]
        pending = [bits(life.pending) for life in self.lives]
        before = self.table.clone()
        report = self.settle(
            self.table, self._rows(Rows, [e for e, _, _ in taken], pending, came),
            self._rows(Plan, [k for _, k, _ in taken], pending, runs,
                       rightmost=self._tensor([max(k, default=-1) for _, k, _ in taken]),
                       sampled_start=self._tensor(start)), self.pace,
            self._tensor([token for token, _ in rows]),
            torch.tensor([score for _, score in rows], dtype=torch.float32, device=self.device), self.stop_words,
            MASK_TOKEN, **self.rules.options())
        assert int(self.pace.turn) == turn + 1 and report.shape == (len(self.lives), report_width(length))
        alive = state_columns(self.table, length).alive.tolist()
        told = {name: value.tolist() for name, value in vars(report_columns(report, length)).items()}
        for s, (life, (entered, kept, sampled)) in enumerate(zip(self.lives, taken, strict=True)):
            own = {name: value[s] for name, value in told.items()}
            if not kept:
                assert self.table[s].equal(before[s]) and own == dict.fromkeys(told, 0) | {
                    'ids': before[s, :length].tolist(), 'masked': own['masked']}
                assert not life.alive or own['masked'] == bits(life.waiting)
                continue
            expected = life.step(entered, kept, {p: sampled[p] for p in kept})
            assert own == expected | {'masked': bits(expected['masked'])}, (s, own, expected)
            assert alive[s] == life.alive
            assert not life.alive or self.table[s].tolist() == life.row(), (s, self.table[s].tolist(), life.row())

    def _rows(self, kind: type[Rows], current: list[set[int]], pending: list[int], there: list[bool],
              **parts: Tensor) -> Any:
        return rows_of(kind, self.rules.length, self._tensor([bits(positions) for positions in current]),
                       self._tensor(pending) * self._tensor(there), **parts)

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
