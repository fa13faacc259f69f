"""One block of 8 from its first step to its commit, with scripted importance: each stage's result by hand.

Red when: any rule of budget, selection, visible KV, delayed cache or statistics changes, or the order they act in.
"""
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from lmdeploy_focus.stages import budget, compact, delayed_cache, select
from lmdeploy_focus.stages.state import FocusState, unpack_bits
from lmdeploy_focus.stages.view import MASKED, FocusView, entering_view

from .. import oracle

LENGTH, HISTORY, PAGE_SIZE = 8, 24, 16


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


def view_of(state: FocusState, mask: torch.Tensor, rule: str) -> FocusView:
    """What enters the step, as `step.enter` makes it."""
    entering = delayed_cache.entering(state, mask, 'delayed-neighbour', full_commit=False)
    history = torch.tensor([HISTORY])
    view = entering_view(torch.zeros(1, LENGTH, dtype=torch.int64), entering, mask, history, torch.tensor([[3, 1]]),
                         PAGE_SIZE, history, HISTORY + LENGTH)
    view.kv_len = delayed_cache.visible(history, view.rightmost(), state, rule)
    return view


@pytest.mark.parametrize('rule', ['progress', 'reference'])
def test_stages(rule):
    """In this example the two rules of visible KV agree: no step ends left of an earlier one."""
    state = FocusState.fresh(torch.tensor([-1]))
    for step in STEPS:
        mask = torch.tensor([[int(digit) for digit in step.mask]], dtype=torch.uint8)
        view = view_of(state, mask, rule)
        assert view.position.tolist() == step.enters
        assert view.kv_len.tolist() == [HISTORY + LENGTH]

        rows, positions = view.candidates()
        delta = torch.zeros(1, LENGTH)
        delta[0, :len(step.delta)] = torch.tensor(list(step.delta.values()))
        assert positions[positions >= 0].tolist() == list(step.delta)
        assert view.position[rows[rows >= 0]].tolist() == list(step.delta)
        budgets = budget.allot((rows >= 0).sum(1), state, 1.5, None)
        assert budgets.tolist() == [step.allowed]

        keep = select.keep_rows(delta, rows, positions, budgets, view, state.progress, 'top', False, 0)
        kept, index = compact.take(view, keep, view.kv_len)
        assert kept.position.tolist() == view.position[index].tolist() == step.kept
        visible = delayed_cache.visible(kept.history, kept.rightmost(), state, rule)
        assert visible.tolist() == [HISTORY + step.kv_len]

        after = mask.clone()
        after[0, step.decoded] = 1
        state = delayed_cache.advance(state, mask, after, kept.rightmost(), 'delayed-neighbour')
        assert state.progress.tolist() == [step.progress]
        assert unpack_bits(state.uncached, LENGTH).nonzero()[:, 1].tolist() == step.uncached
    assert (state.decoded.tolist(), state.steps.tolist()) == ([8], [4])


def test_oracle():
    """The same through the golden model, so that the two cannot drift apart together."""
    block = oracle.Block(LENGTH)
    for step in STEPS:
        mask = [int(digit) for digit in step.mask]
        entering = block.entering(mask)
        assert entering == step.enters
        positions = [p for p in entering if mask[p] == MASKED]
        allowed = oracle.budget(len(positions), block.decoded, block.steps, Fraction(3, 2))
        assert allowed == step.allowed
        stays = oracle.select([step.delta[p] for p in positions], positions, allowed, block.progress)
        kept = [p for p in entering if mask[p] != MASKED or stays[positions.index(p)]]
        assert kept == step.kept
        for rule in ('progress', 'reference'):
            assert oracle.visible(HISTORY, kept[-1], block.progress, rule) == HISTORY + step.kv_len
        after = [1 if p in step.decoded else m for p, m in enumerate(mask)]
        block.advance(mask, after, kept[-1])
        assert (block.progress, block.uncached()) == (step.progress, step.uncached)
    assert (block.decoded, block.steps) == (8, 4)


def test_a_decoded_tail_stays_visible():
    """Positions 6 and 7 ran and are frozen, 3 is the last that runs now: by 'progress' the tail is seen, by 'reference'
    it is not (the authors' code). Red when: the rules change places or progress is ignored."""
    state = FocusState.fresh(torch.tensor([7]))
    for rule, seen in (('progress', HISTORY + 8), ('reference', HISTORY + 4)):
        assert delayed_cache.visible(torch.tensor([HISTORY]), torch.tensor([3]), state, rule).tolist() == [seen]
        assert oracle.visible(HISTORY, 3, 7, rule) == seen
