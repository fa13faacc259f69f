"""One block of 8 from its first step to its commit, with scripted importance: each stage's result by hand.

Red when: any rule of budget, selection, visible KV, delayed cache, statistics or commit changes, or the order they act
in.
"""
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from lmdeploy_focus.kernels.dispatch import kernels_for

from lmdeploy_focus.stages import delayed_cache, select, unmask
from lmdeploy_focus.stages.decoder import Model
from lmdeploy_focus.stages.state import FocusState, first_rows, unpack_bits
from lmdeploy_focus.stages.step_options import StepOptions
from lmdeploy_focus.stages.view import FocusView

from .. import oracle

LENGTH, HISTORY, PAGE_SIZE, MASK_TOKEN = 8, 24, 16, 99


@dataclass(frozen=True)
class Step:
    """One row of the example; positions are block-local.

    Attributes:
        mask: on input, '1' is decoded.
        enters: positions that enter.
        delta: scripted importance of the masked ones.
        allowed: the budget.
        kept: positions that stay.
        progress, kv_len: after the step, and what the suffix sees of the block.
        decoded: positions decided at the end.
        uncached: what enters the next step.
    """
    mask: str
    enters: list[int]
    delta: dict[int, float]
    allowed: int
    kept: list[int]
    progress: int
    kv_len: int
    decoded: list[int]
    uncached: list[int]


STEPS = [
    Step('00000000', list(range(8)), {0: 3, 1: 2.5, 2: .2, 3: .1, 4: -.5, 5: -1, 6: -2, 7: -2.3}, 2, [0, 1], 1, 2,
         [0, 1], list(range(8))),
    Step('11000000', list(range(8)), {2: 1, 3: .4, 4: 2.2, 5: -.6, 6: -1, 7: -2}, 3, [0, 1, 2, 3, 4], 4, 5, [2, 4],
         list(range(1, 8))),
    Step('11101000', list(range(1, 8)), {3: 2, 5: 1.8, 6: -.5, 7: -1.5}, 3, list(range(1, 7)), 6, 7, [3, 5],
         list(range(2, 8))),
    Step('11111100', list(range(2, 8)), {6: .3, 7: .1}, 2, list(range(2, 8)), 7, 8, [6, 7], [5, 6, 7]),
    Step('11111111', [5, 6, 7], {}, 0, [5, 6, 7], 7, 8, [], []),
]
COMMIT = STEPS.pop()


class Example:
    """The block in a state of its own, stage by stage."""

    def __init__(self, rule: str) -> None:
        self.model = Model(None, None, [], kernels_for('cpu'))
        self.options = StepOptions('top', None, 'delayed-neighbour', rule, 'uncached', 'low_confidence_static', 2,
                                   MASK_TOKEN, PAGE_SIZE)
        state = FocusState(1, LENGTH, 'cpu')
        one = torch.ones(1, dtype=torch.int64)
        state.append(first_rows(one[:, None].repeat(1, LENGTH) * MASK_TOKEN, torch.ones(1, LENGTH, dtype=torch.bool),
                                one * HISTORY, one * 99, one * HISTORY, one, 1.5, .8))
        self.view = FocusView.fixed(state, 3, 48, 16)
        self.view.page_table[0] = torch.tensor([3, 1, 2])
        self.state = state.columns

    def waiting(self) -> str:
        """Digits as in the table."""
        return ''.join('01'[not flag] for flag in unpack_bits(self.state.masked, LENGTH)[0])

    def step(self, delta: dict[int, float], decoded: list[int]) -> None:
        """One step; of the kept positions, `decoded` are the most confident."""
        delayed_cache.enter(self.model, self.view, self.options)
        waiting = unpack_bits(self.view.entered.current & self.state.masked, LENGTH)[0].nonzero()[:, 0].tolist()
        assert waiting == list(delta)
        scripted = torch.zeros(1, 1, LENGTH)
        scripted[0, 0, :len(delta)] = torch.tensor(list(delta.values()))
        self.view.partials = torch.zeros(1, 1, LENGTH), scripted
        select.plan(self.model, self.view, self.options, evicting=True)
        places = self.view.plan.sampled_position[:self.view.rows_sampled()]
        scores = torch.tensor([float(p in decoded) for p in places.tolist()])
        unmask.settle(self.model, self.view, self.options, places + 40, scores)


def of(rows, name: str) -> list[int]:
    """A row field of all rows."""
    return getattr(rows, name)[:int(rows.start[-1])].tolist()


@pytest.mark.parametrize('rule', ['progress', 'reference'])
def test_stages(rule):
    """In this example the two rules of visible KV agree: no step ends left of an earlier one. What the table calls the
    fifth step runs beside the first step of the next block."""
    example = Example(rule)
    for step in STEPS:
        assert example.waiting() == step.mask
        before = example.state.decoded.item(), example.state.steps.item()
        example.step(step.delta, step.decoded)
        rows, plan = example.view.entered, example.view.plan
        assert of(rows, 'position') == step.enters
        assert of(rows, 'visible') == [HISTORY + LENGTH] * len(step.enters)
        assert oracle.budget(len(step.delta), *before, Fraction(3, 2)) == step.allowed
        assert of(plan, 'position') == step.kept
        assert of(plan, 'visible') == [HISTORY + step.kv_len] * len(step.kept)
        if step is not STEPS[-1]:
            assert example.state.progress.tolist() == [step.progress]
            assert unpack_bits(example.state.uncached, LENGTH).nonzero()[:, 1].tolist() == step.uncached
            assert example.state.decoded.item() == sum(len(own.decoded) for own in STEPS[:STEPS.index(step) + 1])
    assert plan.rightmost.tolist() == [STEPS[-1].progress]
    assert unpack_bits(example.state.pending, LENGTH).nonzero()[:, 1].tolist() == COMMIT.enters
    assert example.state.history.tolist() == [HISTORY + LENGTH] and example.waiting() == STEPS[0].mask
    assert (example.state.decoded.tolist(), example.state.steps.tolist()) == ([0], [0])

    example.step(STEPS[0].delta, STEPS[0].decoded)
    for rows, own in ((example.view.entered, STEPS[0].enters), (example.view.plan, STEPS[0].kept)):
        seen = LENGTH if own == STEPS[0].enters else STEPS[0].kv_len
        assert of(rows, 'position') == [p - LENGTH for p in COMMIT.kept] + own
        assert of(rows, 'visible') == [HISTORY + COMMIT.kv_len] * 3 + [HISTORY + LENGTH + seen] * len(own)
        assert of(rows, 'position_ids') == [HISTORY + p for p in COMMIT.kept] + [HISTORY + LENGTH + p for p in own]
        assert of(rows, 'input_ids') == [p + 40 for p in COMMIT.kept] + [MASK_TOKEN] * len(own)
        assert of(rows, 'pages') == [1] * 3 + [2] * len(own)
        assert of(rows, 'offsets') == [8 + p for p in COMMIT.kept] + own
    assert example.state.pending.tolist() == [0]


def test_oracle():
    """The same through the golden model, so that the two cannot drift apart together."""
    block = oracle.Block(LENGTH)
    for step in [*STEPS, COMMIT]:
        mask = [int(digit) for digit in step.mask]
        entering = block.entering(mask)
        assert entering == step.enters
        positions = [p for p in entering if mask[p] == oracle.MASKED]
        allowed = oracle.budget(len(positions), block.decoded, block.steps, Fraction(3, 2))
        assert allowed == step.allowed
        stays = oracle.select([step.delta[p] for p in positions], positions, allowed, block.progress)
        kept = [p for p in entering if mask[p] != oracle.MASKED or stays[positions.index(p)]]
        assert kept == step.kept
        for rule in ('progress', 'reference'):
            assert oracle.visible(HISTORY, kept[-1], block.progress, rule) == HISTORY + step.kv_len
        after = [1 if p in step.decoded else m for p, m in enumerate(mask)]
        block.advance(mask, after, kept[-1])
        assert (block.progress, block.uncached()) == (step.progress, step.uncached)
    assert (block.decoded, block.steps) == (8, 4)


@pytest.mark.parametrize('rule, seen', [('progress', HISTORY + 8), ('reference', HISTORY + 4)])
def test_a_decoded_tail_stays_visible(rule, seen):
    """Positions 6 and 7 ran and are frozen, 3 is the last that runs now: by 'progress' the tail is seen, by 'reference'
    it is not (the authors' code). Red when: the rules change places or progress is ignored."""
    example = Example(rule)
    for name, value in {'masked': 0b1000, 'uncached': 0b1100, 'progress': 7}.items():
        getattr(example.state, name).fill_(value)
    example.step({3: 1.}, [])
    assert of(example.view.entered, 'visible') == of(example.view.plan, 'visible') == [seen] * 2
    assert oracle.visible(HISTORY, 3, 7, rule) == seen
