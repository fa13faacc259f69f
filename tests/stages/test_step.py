"""A whole denoising step on a tiny decoder: against one sequence at a time, whose finished blocks are committed by
forwards of their own; against itself with everything kept; and against the same sequence in other company."""
from dataclasses import replace

import pytest
import torch
from lmdeploy_focus.kernels.layout import Pace, report_columns, state_columns
from torch import Tensor

from lmdeploy_focus.stages import layer as stages_layer
from lmdeploy_focus.stages import replay, step
from lmdeploy_focus.stages.state import unpack_bits
from lmdeploy_focus.stages.step_options import StepOptions
from lmdeploy_focus.stages.view import FocusView

from ..kernels.block_life import bits
from . import simulation
from .tiny_batch import FOCUS, TinyBatch, make, start
from .tiny_decoder import LAYERS, MASK_TOKEN, UNWRITTEN


class Run:
    """One step, stage by stage: its view, final hidden states and report."""

    def __init__(self, batch: TinyBatch, options: StepOptions, evicting: bool = True) -> None:
        count = batch.state.count
        options = replace(options, page_size=batch.page_size)
        self.view = view = FocusView(batch.state.table[:count], batch.page_table, batch.stop_words,
                                     Pace.unlimited('cpu'), batch.state.length,
                                     batch.page_table.size(1) * batch.page_size)
        step.enter(batch.model, view, options)
        entered = step.rank(batch.model, view, options, evicting, view.rows_entered())
        self.hidden = step.denoise(batch.model, view, step.evict(batch.model, view, entered, view.rows_kept()))

        def greedy(logits: Tensor, real: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            return batch.model.kernels.greedy_head(logits, MASK_TOKEN, real)

        self.report = report_columns(step.decide(batch.model, view, options, self.hidden, view.rows_sampled(), greedy),
                                     view.length)

    def own(self, rows, s: int) -> slice:
        """The rows of a sequence."""
        return slice(int(rows.start[s]), int(rows.start[s + 1]))


def assert_simulated(batch: TinyBatch, golden: list[simulation.Sequence], options: StepOptions, evicting: bool = True,
                     tolerance: float = 1e-4) -> Run:
    """One step of both: rows, importance, hidden states, every slot of every cache, report, state."""
    run = Run(batch, options, evicting)
    length = batch.state.length
    for s, own in enumerate(golden):
        rows, kept = run.own(run.view.entered, s), run.own(run.view.plan, s)
        if not own.life.alive:
            assert rows.start == rows.stop and kept.start == kept.stop and not run.report.ran[s]
            continue
        one = simulation.denoise(batch.model.decoder, own, options, evicting)
        assert run.view.entered.position[rows].tolist() == one.entered
        assert run.view.plan.position[kept].tolist() == one.kept
        torch.testing.assert_close(run.hidden[kept], one.hidden, rtol=tolerance, atol=tolerance)
        for partial, expected in zip(run.view.partials, one.importance, strict=False):
            torch.testing.assert_close(partial[s].sum(0)[:len(expected)], torch.tensor(expected), rtol=0, atol=1e-4)
        for layer, texts in zip(batch.model.caches, own.caches, strict=True):
            for half, text in zip(layer, texts, strict=True):
                torch.testing.assert_close(batch.text(half, s), text, rtol=tolerance, atol=tolerance)
        expected = simulation.settle(batch.model.decoder, own, one)
        told = {name: value[s].tolist() for name, value in vars(run.report).items()}
        assert told == expected | {'masked': bits(expected['masked'])}
        state, life = state_columns(batch.state.table, length), own.life
        assert state.alive[s] == life.alive
        for name in ('ids', 'history', 'progress', 'decoded', 'steps', 'appendable') * life.alive:
            value = getattr(state, name)[s].tolist()
            assert value == getattr(life, name, getattr(life.block, name, None)), name
        for name, positions in {'masked': life.waiting, 'pending': life.pending,
                                'uncached': {*life.block.uncached()}}.items():
            own_map = unpack_bits(getattr(state, name), length)[s].nonzero()[:, 0].tolist()
            assert not life.alive or {*own_map} == positions
    return run


@pytest.mark.parametrize('sequences,length,page_size,changes', [
    (1, 4, 64, {}), (3, 16, 16, {}), (17, 8, 16, {}), (3, 16, 8, {'kv_visible': 'reference'}),
    (3, 16, 64, {'cache': 'off'}), (3, 16, 64, {'cache': 'delayed'}), (3, 16, 24, {'commit': 'full'}),
    (3, 16, 64, {'keep': 3}), (3, 32, 64, {}), (3, 16, 8, {'strategy': 'sequential', 'tokens_per_step': 3}),
    (3, 16, 32, {'strategy': 'low_confidence_static'}), (3, 64, 64, {})], ids=str)
def test_steps_are_the_simulations(sequences, length, page_size, changes):
    """Fourteen steps, over the ends of blocks and of sequences.

    Red when: a layer sees more or fewer keys than it should, or a stale one where a new one exists; evicted rows do not
    leave their KV in the first two layers, or leave one in the others; a finished block's commit sees the next one, is
    not seen by it, or misses a layer; statistics, progress or stops go astray.
    """
    options = replace(FOCUS, **changes)
    lives = start(options, length, sequences, seed=sequences + length, stops=True)
    batch = make(lives, page_size, 15, seed=sequences + length)
    golden = batch.simulate(lives)
    evicted = committed = 0
    for _ in range(14):
        if not any(life.alive for life in lives):
            break
        run = assert_simulated(batch, golden, options)
        evicted += run.view.rows_entered() - run.view.rows_kept()
        committed += int(run.view.plan.pending.ne(0).sum())
    assert evicted > 0 or length == 4
    assert committed > 0


@pytest.mark.parametrize('length,page_size,history', [
    (8, 8, 0), (8, 8, 3), (8, 16, 1), (8, 16, 2), (16, 24, 1), (16, 24, 2), (4, 64, 15), (32, 32, 0)])
@pytest.mark.parametrize('cache,commit', [('delayed-neighbour', 'uncached'), ('delayed', 'uncached'),
                                          ('off', 'uncached'), ('delayed-neighbour', 'full')])
@pytest.mark.parametrize('evicting', [False, True])
def test_a_commit_beside_the_next_block_is_one_before_it(length, page_size, history, cache, commit, evicting):
    """The KV of all layers and the hidden states, to rounding, where a block ends with its page (and the next one is on
    another) or amid one, a page is a block, and blocks are finished in one step, one after the other.

    Red when: a commit's rows are stored in the next block's page, see its keys or are not seen by it, are evicted, or
    sampled; or a block that is finished in its first step, beside the commit of the one before, loses either.
    """
    options = replace(FOCUS, cache=cache, commit=commit, keep=2 if evicting else None)
    lives = start(options, length, 2, seed=length + history, threshold=0.)
    for life, blocks in zip(lives, (history, history + 1), strict=True):
        life.output_start += blocks * length - life.history
        life.history = blocks * length
    batch = make(lives, page_size, 5, seed=length)
    golden = batch.simulate(lives)
    twice, before = 0, [0, 0]
    for _ in range(4):
        commits = [{*life.pending} for life in lives]
        run = assert_simulated(batch, golden, options, evicting, tolerance=2e-5)
        assert unpack_bits(run.view.plan.pending, length).sum(1).tolist() == [len(own) for own in commits]
        ended = [life.history for life in lives]
        twice += sum(bool(own) and now == then + length
                     for own, now, then in zip(commits, ended, before, strict=True))
        before = ended
        assert (run.view.plan.sampled_position[:run.view.rows_sampled()] >= 0).all()
    assert evicting or twice >= 4
    for s, life in enumerate(lives):
        committed = life.history - length * bool(life.pending)
        written = [batch.text(half, s)[:committed].ne(UNWRITTEN).all()
                   for layer in batch.model.caches for half in layer]
        assert all(written) and len(written) == 2 * LAYERS


@pytest.mark.parametrize('sequences,length', [(1, 4), (3, 16), (17, 16), (3, 64)])
@pytest.mark.parametrize('kv_visible', ['progress', 'reference'])
def test_everything_kept_is_the_step_without_eviction(sequences, length, kv_visible):
    """With focus_keep=L the eviction path runs and evicts nothing: the same bits as the delayed cache alone, step for
    step. Red when: compaction, the second view or the order of the layers changes a bit."""
    options = replace(FOCUS, keep=length, kv_visible=kv_visible)
    plain, focus = (make(start(options, length, sequences, length, stops=True), 64, 9, seed=length) for _ in range(2))
    for _ in range(8):
        if not plain.state.columns.alive.any():
            break
        expected, result = Run(plain, options, evicting=False), Run(focus, options, evicting=True)
        assert not expected.view.partials[1].any() and result.view.partials[1].any()
        assert result.view.rows_kept() == result.view.rows_entered()
        assert result.hidden.equal(expected.hidden)
        for one, other in zip(plain.model.caches, focus.model.caches, strict=True):
            assert one[0].equal(other[0]) and one[1].equal(other[1])
        assert focus.state.table.equal(plain.state.table) and focus_report(result).equal(focus_report(expected))


def focus_report(run: Run) -> Tensor:
    """The whole of a step's report."""
    assert run.view.report is not None
    return run.view.report


def test_rows_of_each_layer():
    """T rows up to layer 1's queries, N from its attention on; the head gets the R masked ones. Red when: a later layer
    runs evicted rows, or an earlier one leaves some out."""
    batch = make(start(FOCUS, 16, 17, seed=2), 64, 3, seed=2)
    seen = []
    head = batch.model.head
    batch.model.head = lambda hidden: seen.append(len(hidden)) or head(hidden)
    view = Run(batch, FOCUS).view
    entered, kept, sampled = view.rows_entered(), view.rows_kept(), view.rows_sampled()
    assert sampled < kept < entered and seen == [sampled]
    assert [layer.seen for layer in batch.model.decoder.layers] == [
        [('queries', entered), ('finish', entered)], [('queries', entered), ('finish', kept)],
        [('queries', kept), ('finish', kept)]]


def test_attention_is_divided_twice_a_step(monkeypatch):
    """Red when: the work of attention is listed for each layer, or the suffix runs on the list of the prefix."""
    batch, seen = make(start(FOCUS, 16, 3, seed=2), 64, 3, seed=2), []
    original = stages_layer.work
    monkeypatch.setattr(stages_layer, 'work',
                        lambda model, rows, query: seen.append(rows) or original(model, rows, query))
    view = Run(batch, FOCUS).view
    assert len(seen) == 2 and seen[0] is view.entered and seen[1] is view.plan


def test_company_does_not_matter():
    """Each of 17 sequences keeps the same rows and decodes the same tokens alone and in company, step for step.

    Red when: a budget, threshold or rank is taken over the batch, or a row reads another sequence's state.
    """
    batch = make(start(FOCUS, 16, 17, seed=4), 16, 9, seed=4)
    for _ in range(6):
        alone = [batch.take(s) for s in range(17)]
        together = Run(batch, FOCUS)
        for s, one in enumerate(alone):
            run = Run(one, FOCUS)
            row = together.own(together.view.plan, s)
            assert run.view.plan.position.tolist()[:run.view.rows_kept()] == together.view.plan.position[row].tolist()
            torch.testing.assert_close(run.hidden, together.hidden[row], rtol=1e-4, atol=1e-4)
            assert one.state.table[0].equal(batch.state.table[s])


def test_a_replay_decides():
    """Red when: a recording's importances or confidences are not those that the step goes by, or stay in use."""
    class Recording:
        """Everything is worth most at the right, and nothing is certain but position 15."""

        def importances(self, table, entered, first, second):
            return torch.zeros_like(first), torch.arange(16.).expand(first.shape)

        def decisions(self, table, plan, tokens, scores):
            assert len(tokens) == len(scores) == int(plan.sampled_start[-1])
            position = plan.sampled_position[:len(tokens)]
            return position, torch.where(position == 15, 2., 0.)

    options = replace(FOCUS, keep=2)
    batch = make(start(options, 16, 3, seed=2), 64, 3, seed=2)
    state = batch.state.columns
    state.masked.fill_(0xffff)
    state.progress.fill_(15)  # no placeholders
    replay.use(Recording())
    try:
        run = Run(batch, options)
    finally:
        replay.use(None)
    assert run.view.plan.sampled_position[:6].tolist() == [14, 15] * 3
    assert run.report.newly.tolist() == [1] * 3 and run.report.ids[:, 15].tolist() == [15] * 3
    assert replay.current() is None
