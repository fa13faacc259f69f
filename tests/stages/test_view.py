"""The rows of a step: in order, slots where the positions say; those that are kept, and their compaction."""
from dataclasses import fields

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from lmdeploy_focus.kernels.dispatch import kernels_for
from lmdeploy_focus.kernels.layout import Rows, state_columns

from lmdeploy_focus.stages import compact, delayed_cache, select
from lmdeploy_focus.stages.decoder import Model
from lmdeploy_focus.stages.state import FocusState, first_rows, pack_bits
from lmdeploy_focus.stages.step_options import StepOptions
from lmdeploy_focus.stages.suffix import Kept
from lmdeploy_focus.stages.view import STOP_WORDS, FocusView

ROWS = ('sequence', 'position', 'input_ids', 'position_ids', 'pages', 'offsets', 'visible')
MODEL = Model(None, None, [], kernels_for('cpu'))


def options(page_size: int) -> StepOptions:
    return StepOptions('top', 1, 'delayed-neighbour', 'progress', 'uncached', 'low_confidence_dynamic', 1, 99,
                       page_size)


@st.composite
def views(draw):
    """A view with room for more sequences than there are, its page size, and flags [S, 2 L] of the positions that are
    rows: of the finished block, then of the current one; some sequences have stopped."""
    length = draw(st.sampled_from((4, 8, 16, 32, 64)))
    sequences = draw(st.sampled_from((1, 3, 17)))
    page_size = draw(st.sampled_from((4, 16, 64)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masked = torch.from_numpy(random.integers(0, 2, size=(sequences, length)) > 0)
    masked[torch.from_numpy(random.random(sequences) < .3)] = True
    uncached = masked | torch.from_numpy(random.random((sequences, length)) < random.random())
    uncached[~uncached.any(1), random.integers(length)] = True
    pending = torch.from_numpy(random.random((sequences, length)) < random.random((sequences, 1)) - .3)
    history = torch.from_numpy(random.integers(1, 200 // length + 2, size=sequences) * length)
    one = torch.ones(sequences, dtype=torch.int64)
    table = first_rows(torch.from_numpy(random.integers(1000, size=(sequences, length))), masked, history, one * 99,
                       one, one, 1.5, .8)
    columns = state_columns(table, length)
    columns.pending_ids.copy_(torch.from_numpy(random.integers(1000, size=(sequences, length))))
    for name, value in {'uncached': pack_bits(uncached), 'pending': pack_bits(pending),
                        'progress': torch.from_numpy(random.integers(-1, length, size=sequences)),
                        'alive': torch.from_numpy(random.random(sequences) < .9)}.items():
        getattr(columns, name).copy_(value)
    state = FocusState(sequences + 2, length, 'cpu')
    state.append(table)
    width = (200 + 2 * length) // page_size + 2
    view = FocusView.fixed(state, width, width * page_size, (sequences + 2) * 2 * length + 5)
    view.page_table[:sequences] = torch.from_numpy(random.permutation(sequences * width).reshape(sequences, width))
    return view, page_size, torch.cat([pending, uncached], 1) & (columns.alive != 0)[:, None]


def check(view: FocusView, rows: Rows, flags: torch.Tensor, page_size: int) -> None:
    """Every field of `rows` against a loop over the positions that are in it."""
    length, state = view.length, state_columns(view.table, view.length)
    expected = {name: [] for name in ROWS}
    starts, candidates = [0], []
    for s in range(len(view.table)):
        inside = [c - length for c in flags[s].nonzero()[:, 0].tolist()] if s < len(flags) else []
        history, last = int(state.history[s]), max([int(state.progress[s]), *inside])
        own = []
        for p in inside:
            token = (state.ids if p >= 0 else state.pending_ids)[s, p]
            seen = history + last + 1 if p >= 0 else history
            own += [len(expected['position'])] * (p >= 0 and int(state.masked[s]) >> p & 1)
            for name, value in zip(ROWS, (s, p, int(token), history + p,
                                          int(view.page_table[s, (history + p) // page_size]),
                                          (history + p) % page_size, seen), strict=True):
                expected[name].append(value)
        starts.append(len(expected['position']))
        candidates.append(own + [-1] * (length - len(own)))
    for name in ROWS:
        field = getattr(rows, name)
        padding = [-1 if name == 'pages' else 0] * (len(field) - starts[-1])
        assert field.tolist() == expected[name] + padding and field.dtype == torch.int64, name
    assert rows.start.tolist() == starts
    assert rows.candidates.tolist() == candidates


EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


@EXAMPLES
@given(views())
def test_rows_and_slots(case):
    """Red when: rows leave text order or their sequence, `start` is off by one, a page is looked up by block position
    or in another sequence's table, a token comes from the other block, a row that is not masked becomes a candidate, or
    sequences that have stopped or are none at all enter a row."""
    view, page_size, flags = case
    delayed_cache.enter(MODEL, view, options(page_size))
    check(view, view.entered, flags, page_size)
    assert view.rows_entered() == int(flags.sum())


@EXAMPLES
@given(views(), st.integers(0, 2**32 - 1))
def test_a_plan_is_the_view_of_the_kept_rows(case, seed):
    """Taking rows equals building the view of those rows, and they know where they came from. Red when: `start` counts
    rows before eviction, a field of the rows is forgotten, or a sampled row is not a masked one."""
    view, page_size, flags = case
    delayed_cache.enter(MODEL, view, options(page_size))
    random = torch.Generator().manual_seed(seed)
    view.partials = tuple(torch.randn(len(view.table), 2, view.length, generator=random) for _ in range(2))
    select.plan(MODEL, view, options(page_size), evicting=True)
    length, number = view.length, view.rows_kept()
    kept = torch.cat([flags[:, :length], (view.plan.current[:len(flags), None] >> torch.arange(length)) & 1 > 0], 1)
    assert not (kept & ~flags).any()
    check(view, view.plan, kept, page_size)
    source = view.plan.source[:number]
    for name in ('sequence', 'position', 'input_ids', 'position_ids', 'pages', 'offsets'):
        assert getattr(view.entered, name)[source].equal(getattr(view.plan, name)[:number]), name
    sampled = view.plan.sampled[:view.rows_sampled()]
    assert sampled.tolist() == view.plan.candidates[view.plan.candidates >= 0].tolist()
    assert view.plan.sampled_sequence[:len(sampled)].equal(view.plan.sequence[sampled])
    assert view.plan.sampled_position[:len(sampled)].equal(view.plan.position[sampled])
    assert view.plan.sampled_start.diff().tolist() == [int((row >= 0).sum()) for row in view.plan.candidates]


@EXAMPLES
@given(views())
def test_keeping_all_is_the_identity(case):
    """Red when: compaction reorders or drops rows where nothing is evicted."""
    view, page_size, _ = case
    delayed_cache.enter(MODEL, view, options(page_size))
    view.partials = (torch.zeros(len(view.table), 1, view.length),) * 2
    select.plan(MODEL, view, options(page_size), evicting=False)
    assert view.plan.source[:view.rows_kept()].tolist() == list(range(view.rows_entered()))
    for f in fields(Rows):
        assert getattr(view.plan, f.name).equal(getattr(view.entered, f.name)), f.name


def test_what_layer_1_goes_on_with_follows_its_rows():
    """Queries, residual and rotary tables. Red when: one of them keeps the order before eviction."""
    entered = Kept(*(torch.arange(5.)[:, None] + 100 * i for i in range(4)))
    view = FocusView.fixed(FocusState(1, 4, 'cpu'), 1, 8, 8)
    view.plan.source[:4] = torch.tensor([0, 3, 4, 1])
    kept = compact.take(MODEL, view, entered, 3)
    assert [part.flatten().tolist() for part in vars(kept).values()] == [
        [base, base + 3, base + 4] for base in (0, 100, 200, 300)]
    room = kept.room(7)
    assert all(part.shape == (7, 1) and not part.any() for part in vars(room).values())
    room.take(entered)
    assert [part.flatten().tolist() for part in vars(room).values()] == [
        [base, base + 1, base + 2, base + 3, base + 4, 0, 0] for base in (0, 100, 200, 300)]


def test_fixed_buffers():
    """Red when: a buffer is too small for every sequence, or holds something at the start."""
    state = FocusState(3, 16, 'cpu')
    view = FocusView.fixed(state, columns=7, max_kv=448, capacity=96)
    assert view.table is state.table and view.page_table.shape == (3, 7)
    assert view.stop_words.shape == (3, STOP_WORDS) and view.stop_words.eq(-1).all()
    assert len(view.entered.sequence) == len(view.plan.sampled) == 96
    assert view.report.shape[0] == 3 and view.pace.limits.min() > 10**6
