"""Budget and selection on the rows of a step: against exact arithmetic, and what must hold for every kept set."""
from dataclasses import dataclass
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lmdeploy_focus.kernels.dispatch import kernels_for
from lmdeploy_focus.kernels.layout import Pace, state_columns
from torch import Tensor

from lmdeploy_focus.stages import delayed_cache, importance, prefix, select
from lmdeploy_focus.stages.decoder import Model
from lmdeploy_focus.stages.state import first_rows, pack_bits, unpack_bits
from lmdeploy_focus.stages.step_options import StepOptions
from lmdeploy_focus.stages.view import FocusView

from .. import oracle
from ..kernels.select_cases import deltas

SEQUENCES = 50  # a call decides many cases at once
CASES = settings(max_examples=20_000 // SEQUENCES, deadline=None, derandomize=True)
MODEL = Model(None, None, [], kernels_for('cpu'))
OPTIONS = {'selection': 'top', 'keep': None, 'cache': 'delayed-neighbour', 'kv_visible': 'progress',
           'commit': 'uncached', 'strategy': 'low_confidence_dynamic', 'tokens_per_step': 1, 'mask_token': 99,
           'page_size': 10**6}


@dataclass
class Case:
    """Sequences amid their blocks, before a step.

    Attributes:
        view: their state.
        masked, entering: positions of each, ascending.
        delta: [S, L], importance gained by the j-th masked one.
        alphas: of the budget, exact.
    """
    view: FocusView
    masked: list[list[int]]
    entering: list[list[int]]
    delta: Tensor
    alphas: list[Fraction]

    @property
    def state(self):
        """Columns."""
        return state_columns(self.view.table, self.view.length)

    def kept(self, evicting: bool = True, **options) -> list[list[int]]:
        """Masked positions that stay, a list a sequence."""
        plan = self.plan(evicting, **options)
        return [positions.nonzero()[:, 0].tolist()
                for positions in unpack_bits(plan.current & self.state.masked, self.view.length)]

    def plan(self, evicting: bool = True, **options):
        """The plan of the step, with importance spread over two key heads and two layers."""
        options = StepOptions(**OPTIONS | options)
        delayed_cache.enter(MODEL, self.view, options)
        level = torch.ones_like(self.delta)  # equal deltas stay equal, and ties ties
        importance.compare(self.view, torch.stack([level, 0 * level], 1), torch.stack([level, self.delta], 1))
        select.plan(MODEL, self.view, options, evicting)
        return self.view.plan

    def allowed(self, s: int) -> int:
        """The budget of a sequence."""
        return oracle.budget(len(self.masked[s]), int(self.state.decoded[s]), int(self.state.steps[s]), self.alphas[s])


def make(sequences: int, length: int, seed: int) -> Case:
    """0, 1, L and other numbers of masked tokens, any statistics, and a block before it that is committed or not."""
    random = np.random.default_rng(seed)
    masked, entering, delta, pending = [], [], torch.zeros(sequences, length), []
    for s in range(sequences):
        count = int(random.choice([0, 1, length, *random.integers(length + 1, size=3)]))
        masked.append(sorted(random.permutation(length)[:count].tolist()))
        entering.append(sorted({*masked[-1], int(random.integers(length)), *random.integers(length, size=length // 3)}))
        # 1/64 and so on: exact also beside the level of `plan`
        delta[s, :count] = torch.from_numpy(np.round(deltas(random, count) * 2**12) / 2**12)
        pending.append(int(random.integers(2**(length - 1))) * int(random.integers(2)))
    hundredths = random.integers(100, random.choice([200, 400, 6400]), size=sequences)
    steps = random.integers(0, length + 1, size=sequences)
    one = torch.ones(sequences, dtype=torch.int64)
    flags = torch.zeros(2, sequences, length, dtype=torch.bool)
    for own, sets in zip(flags, (masked, entering), strict=True):
        for s, positions in enumerate(sets):
            own[s, positions] = True
    table = first_rows(torch.zeros(sequences, length, dtype=torch.int64), flags[0],
                       torch.from_numpy(random.integers(1, 99, size=sequences)) * length, one * 99, one, one, 1., .8)
    state = state_columns(table, length)
    state.uncached.copy_(pack_bits(flags[1]))
    for name, values in {'pending': pending, 'progress': random.integers(-1, length, size=sequences), 'steps': steps,
                         'decoded': np.where(steps, random.integers(steps, length + 1), 0),
                         'alpha': hundredths / 100}.items():
        getattr(state, name).copy_(torch.as_tensor(values))
    view = FocusView(table, torch.zeros(sequences, 1, dtype=torch.int64), -one[:, None], Pace.unlimited('cpu'), length,
                     10**6)
    return Case(view, masked, entering, delta, [Fraction(int(value), 100) for value in hundredths])


@st.composite
def cases(draw):
    """A batch of one block length."""
    return make(SEQUENCES, draw(st.sampled_from((4, 8, 16, 32, 64))), draw(st.integers(0, 2**32 - 1)))


@CASES
@given(cases())
def test_kept_set_is_the_oracles(case):
    """20,000 sequences, with and without the paper's rules.

    Red when: alpha multiplies before the mean is clamped, the ceiling becomes a rounding or a step count of zero
    divides; the deviation is a sample's, the threshold is strict, a tie goes to the larger position, the neighbour rule
    hops twice or looks at neighbours in the list, placeholders start at `progress`; the layers' difference is taken the
    wrong way round or over one head; a fixed budget still follows alpha, the threshold or the neighbour rule.
    """
    progress = case.state.progress.tolist()
    kept, fixed = case.kept(), case.kept(keep=3)
    for s, masked in enumerate(case.masked):
        delta = case.delta[s, :len(masked)].tolist()
        for result, allowed, paper in ((kept, case.allowed(s), True), (fixed, min(3, len(masked)), False)):
            stays = oracle.select(delta, masked, allowed, progress[s], paper)
            assert result[s] == [p for p, stay in zip(masked, stays, strict=True) if stay], (delta, masked, allowed)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_every_plan_obeys_the_rules(case):
    """Red when: fewer than the budget stay, a decided or a committed row is evicted, or a row that did not enter is
    kept; a later layer would attend to a KV that was never computed; without eviction a row is lost."""
    plan = case.plan()
    current = [flags.nonzero()[:, 0].tolist() for flags in unpack_bits(plan.current, case.view.length)]
    for s, (masked, entering) in enumerate(zip(case.masked, case.entering, strict=True)):
        stays = {*current[s]} & {*masked}
        assert len(stays) >= case.allowed(s)
        assert {*entering} - {*masked} <= {*current[s]} <= {*entering}
        last = max(current[s])
        assert plan.rightmost[s] == last
        assert not [p for p in masked if case.state.progress[s] < p < max(stays, default=-1) and p not in stays]
    assert plan.pending.equal(case.state.pending)
    everything = case.plan(evicting=False)
    assert everything.current.equal(case.view.entered.current) and everything.start.equal(case.view.entered.start)


SHAPES = pytest.mark.parametrize('sequences,length', [(1, 4), (3, 16), (17, 32), (17, 64)])


@SHAPES
@pytest.mark.parametrize('options', [{'selection': 'bottom'}, {'selection': 'bottom', 'keep': 3}], ids=str)
def test_bottom(sequences, length, options):
    """Red when: 'bottom' ranks like 'top', or an ablation still follows the deviation threshold and the left-neighbour
    rule, or a decision lands on another sequence's row."""
    for seed in range(20):
        case = make(sequences, length, seed)
        for s, kept in enumerate(case.kept(**options)):
            own = case.masked[s]
            allowed = min(options['keep'], len(own)) if 'keep' in options else case.allowed(s)
            scores = [-value for value in case.delta[s, :len(own)].tolist()]
            stays = oracle.select(scores, own, allowed, int(case.state.progress[s]), False)
            assert kept == [p for p, stay in zip(own, stays, strict=True) if stay]


@SHAPES
def test_random_is_a_property_of_the_place(sequences, length):
    """Red when: the random ranking depends on the batch, on the importance or on a global generator; or when it is the
    same everywhere."""
    case = make(sequences, length, 3)
    case.state.progress.fill_(length)  # without placeholders, which would hide the ranking
    together = case.kept(selection='random', keep=2)
    case.delta = torch.randn_like(case.delta)
    assert case.kept(selection='random', keep=2) == together
    for s in range(sequences):
        alone = make(sequences, length, 3)
        alone.view.table = case.view.table[s:s + 1]
        alone.view.page_table, alone.view.entered, alone.view.plan = alone.view.page_table[:1], None, None
        alone.delta = alone.delta[:1]
        assert alone.kept(selection='random', keep=2) == [together[s]]


def test_random_keeps_every_place_alike():
    """20,000 blocks of 8 masked tokens with K=2: each position stays in a quarter of them, within six deviations.

    Red when: the hash favours a position, or every block of a text gets the same set.
    """
    length, blocks = 8, 20_000
    case = make(1, length, 0)
    one = torch.ones(blocks, dtype=torch.int64)
    table = first_rows(torch.zeros(blocks, length, dtype=torch.int64), torch.ones(blocks, length, dtype=torch.bool),
                       torch.arange(blocks) * length, one, one, one, 1., .8)
    case.view = FocusView(table, torch.zeros(blocks, 1, dtype=torch.int64), -one[:, None], Pace.unlimited('cpu'),
                          length, 10**6)
    case.state.progress.fill_(length)
    case.delta = torch.zeros(blocks, length)
    keep = unpack_bits(case.plan(selection='random', keep=2).current, length)
    assert keep.sum(1).eq(2).all()
    share = keep.float().mean(0)
    assert (share - .25).abs().max() < 6 * (.25 * .75 / blocks)**.5


@SHAPES
def test_sequential_positions_always_stay(sequences, length):
    """Red when: the positions that sequential unmasking decides next are evicted, or replace the selection."""
    for seed in range(10):
        case = make(sequences, length, seed)
        plain = case.kept()
        sequential = case.kept(strategy='sequential', tokens_per_step=3)
        for s, kept in enumerate(sequential):
            assert kept == sorted({*plain[s], *case.masked[s][:3]})


def test_all_ranks_rank_alike():
    """Two ranks of two key heads each, gathered in their order. Red when: a rank goes by its own heads alone."""
    case = make(3, 16, 0)
    delayed_cache.enter(MODEL, case.view, StepOptions(**OPTIONS))
    query, key = torch.randn(case.view.rows_entered(), 8, 8), torch.randn(case.view.rows_entered(), 4, 8)
    halves = [prefix.Queries(query[:, 4 * rank:4 * rank + 4], key[:, 2 * rank:2 * rank + 2], query, .5)
              for rank in range(2)]
    whole = importance.received(MODEL, prefix.Queries(query, key, query, .5), case.view)
    own = [importance.received(MODEL, half, case.view) for half in halves]
    ranked = Model(None, None, [], MODEL.kernels, gather=lambda partial: torch.cat(own, 1))
    for half in halves:
        assert importance.received(ranked, half, case.view).equal(whole)
    assert not own[0].equal(own[1])


def test_a_step_that_keeps_everything_ranks_nothing():
    """Red when: a step without keys computes an importance, or one with keys takes other rows than the candidates."""
    case = make(3, 16, 0)
    delayed_cache.enter(MODEL, case.view, StepOptions(**OPTIONS))
    query = torch.randn(case.view.rows_entered(), 4, 8)
    nothing = importance.received(MODEL, prefix.Queries(query, None, query, .5), case.view)
    assert nothing.shape[::2] == (3, 16) and not nothing.any()
    key = torch.randn(len(query), 2, 8)
    some = importance.received(MODEL, prefix.Queries(query, key, query, .5), case.view).sum(1)
    for s, masked in enumerate(case.masked):
        own = slice(int(case.view.entered.start[s]), int(case.view.entered.start[s + 1]))
        rows = [i for i, p in enumerate(case.view.entered.position[own].tolist()) if p in masked]
        expected = oracle.importance(query[own][rows], key[own][rows], .5)
        torch.testing.assert_close(some[s, :len(masked)], torch.tensor(expected, dtype=torch.float32))
