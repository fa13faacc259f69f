"""Sequences in a FocusState that walk through `enter`, `plan` and `settle` without a model.

Importance, tokens and confidences are random. Each sequence is also a life of its own in plain Python, and every step
is compared with it: what enters, what is kept, who waits, the report, and the state that is left.
"""
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from lmdeploy_focus.kernels import reference_enter, reference_plan, reference_settle
from lmdeploy_focus.kernels.layout import FIELDS, TURNS, Pace, Plan, Rows, report_columns, state_columns
from torch import Tensor

from lmdeploy_focus.stages.state import FocusState, first_rows

from .. import oracle
from ..kernels.block_life import Life, Rules, bits
from ..kernels.select_cases import deltas
from ..kernels.settle_checks import MASK_TOKEN

ALPHA = 1.5
PAGE_SIZE = 10**6  # every text in one page
SCORES = (0.0, .25, .5, .75, .9, 1.0, float('nan'))
STOP_WORDS = 3


def fresh(rules: Rules, prompt: int, blocks: int, random: np.random.Generator, stops: bool = True) -> Life:
    """A prefilled sequence: tokens of the prompt in the block or none, masks behind them, any number of blocks before.

    With `stops` it has stop words and a length cap, sooner or later.
    """
    length = rules.length
    ids = random.integers(0, 60, size=prompt).tolist() + [MASK_TOKEN] * (length - prompt)
    return Life(rules, ids, set(range(prompt, length)), blocks * length,
                appendable=prompt + int(random.integers(1, 5 * length)) if stops else 10**9,
                output_start=blocks * length + prompt,
                stop_words=set(random.integers(0, 60, size=STOP_WORDS).tolist()) if stops else set(), threshold=.75,
                block=oracle.Block(length, rules.cache), committing=[0] * length,
                random_offset=int(random.integers(99)))


def first(lives: list[Life]) -> Tensor:
    """Their rows of a state table."""
    def of(name: str) -> Tensor:
        return torch.tensor([getattr(life, name) for life in lives])

    masked = torch.tensor([[p in life.waiting for p in range(life.rules.length)] for life in lives])
    return first_rows(of('ids'), masked, of('history'), of('appendable'), of('output_start'), of('random_offset'),
                      ALPHA, lives[0].threshold)


@dataclass
class Walk:
    """What a step did.

    Attributes:
        rows, plan: of the twins.
        entered, kept, pending: positions of each sequence in its block, and in the finished block that it commits;
            empty where it did not run.
    """
    rows: Rows
    plan: Plan
    entered: list[set[int]]
    kept: list[set[int]]
    pending: list[set[int]]


class Batch:
    """Lives beside the rows of a state.

    Args:
        rules: of all of them.
        state: has as many sequences as there are lives, always.
    """

    def __init__(self, rules: Rules, state: FocusState) -> None:
        self.rules, self.state = rules, state
        self.lives: list[Life] = []
        self.pace = Pace.unlimited('cpu')

    def check(self) -> None:
        """Rows of those that are alive are their lives', all others are not alive."""
        assert self.state.count == len(self.lives)
        whole = (1 << self.rules.length) - 1
        uncached = 2 * self.rules.length + FIELDS.index('uncached')
        alive = self.state.columns.alive.tolist()
        for s, life in enumerate(self.lives):
            assert alive[s] == life.alive
            row, expected = self.state.table[s].tolist(), life.row()
            row[uncached], expected[uncached] = row[uncached] & whole, expected[uncached] & whole
            assert not life.alive or row == expected, s
        assert not state_columns(self.state.table, self.rules.length).alive[len(self.lives):].any()

    def step(self, random: np.random.Generator, limits: tuple[int, int, int] = (10**6,) * 3) -> Walk:
        """One step of all sequences, for at most so many rows that enter, are kept and are sampled."""
        count, length, turn = self.state.count, self.rules.length, int(self.pace.turn)
        table = self.state.table[:count]
        self.pace.limits.copy_(torch.tensor(limits))
        before = table.clone()
        rows = reference_enter.enter(table, torch.arange(count)[:, None], PAGE_SIZE, self.pace, length)
        entered = self._entering(turn, limits[0])
        assert rows.current.tolist() == [bits(own) for own in entered]
        assert rows.pending.tolist() == [bits(life.pending) if own else 0
                                         for life, own in zip(self.lives, entered, strict=True)]

        delta = torch.zeros(count, length)
        for s, (life, own) in enumerate(zip(self.lives, entered, strict=True)):
            waiting = len(life.waiting & own)
            delta[s, :waiting] = torch.from_numpy(deltas(random, waiting))
        plan = reference_plan.plan(torch.zeros(count, 1, length), delta[:, None], table, rows, self.pace, length,
                                   sequential=always_kept(self.rules))
        kept = self._keeping(entered, delta.tolist(), turn, limits)
        assert plan.current.tolist() == [bits(own) for own in kept]
        assert self.pace.totals[turn % TURNS, 3] == sum(life.alive and not own
                                                        for life, own in zip(self.lives, kept, strict=True))

        walk = Walk(rows, plan, entered, kept, [set(life.pending) if own else set()
                                                for life, own in zip(self.lives, kept, strict=True)])
        self._settle(walk, before, random)
        return walk

    def _settle(self, walk: Walk, before: Tensor, random: np.random.Generator) -> None:
        count, length = self.state.count, self.rules.length
        tokens = random.integers(60 if random.integers(2) else 2000, size=(count, length))
        scores = random.choice(np.array(SCORES[:random.choice([2, 5, 7])], np.float32), size=(count, length))
        flat = [(s, p) for s, (life, own) in enumerate(zip(self.lives, walk.kept, strict=True))
                for p in sorted(own & life.waiting)]
        at = tuple(np.array(flat, dtype=np.int64).reshape(-1, 2).T)
        stop_words = torch.tensor([sorted(life.stop_words) + [-1] * (STOP_WORDS + 1 - len(life.stop_words))
                                   for life in self.lives])
        report = reference_settle.settle(
            self.state.table[:count], walk.rows, walk.plan, self.pace, torch.from_numpy(tokens[at]),
            torch.from_numpy(scores[at]), stop_words, MASK_TOKEN, **self.rules.options())
        told = {name: value.tolist() for name, value in vars(report_columns(report, length)).items()}
        for s, (life, entered, kept) in enumerate(zip(self.lives, walk.entered, walk.kept, strict=True)):
            own = {name: value[s] for name, value in told.items()}
            if kept:
                sampled = {p: (int(tokens[s, p]), float(scores[s, p])) for p in kept & life.waiting}
                expected = life.step(entered, kept, sampled)
                assert own == expected | {'masked': bits(expected['masked'])}, (s, own, expected)
            else:
                assert own['ran'] == own['stopped'] == 0
                assert self.state.table[s].equal(before[s]), 'one that waits or has ended stays as it is'
        self.check()

    def _entering(self, turn: int, limit: int) -> list[set[int]]:
        """Positions of the block that enter; none of those that have stopped or have to wait."""
        wanted = [len(life.entering()) + len(life.pending) if life.alive else 0 for life in self.lives]
        fits = fitting(wanted, turn, limit)
        return [life.entering() if life.alive and s in fits else set() for s, life in enumerate(self.lives)]

    def _keeping(self, entered: list[set[int]], delta: list[list[float]], turn: int,
                 limits: tuple[int, int, int]) -> list[set[int]]:
        """Positions of the block that are kept."""
        kept = []
        for life, own, ranking in zip(self.lives, entered, delta, strict=True):
            masked = sorted(own & life.waiting)
            allowed = oracle.budget(len(masked), life.block.decoded, life.block.steps, Fraction(ALPHA))
            stays = oracle.select(ranking[:len(masked)], masked, allowed, life.block.progress)
            chosen = {p for p, stay in zip(masked, stays, strict=True) if stay}
            kept.append(chosen | (must_keep(life) & own))
        samples = [len(own & life.waiting) for life, own in zip(self.lives, kept, strict=True)]
        wanted = [len(own) + len(life.pending) if own else 0 for life, own in zip(self.lives, kept, strict=True)]
        fits = fitting(wanted, turn, limits[1]) & fitting(samples, turn, limits[2])
        return [own if s in fits else set() for s, own in enumerate(kept)]


def must_keep(life: Life) -> set[int]:
    """Entering positions that no eviction takes: the decided ones, and those that 'sequential' decides next."""
    return (life.entering() - life.waiting) | set(sorted(life.waiting)[:always_kept(life.rules)])


def always_kept(rules: Rules) -> int:
    """Masked positions that are always kept."""
    return rules.tokens_per_step if rules.strategy == 'sequential' else 0


def fitting(wanted: list[int], turn: int, limit: int) -> set[int]:
    """Who has room, when sequence turn % S is served first and none behind one that waits."""
    first = turn % len(wanted)
    fits = set()
    for s in [*range(first, len(wanted)), *range(first)]:
        limit -= wanted[s]
        if limit >= 0:
            fits.add(s)
    return fits
