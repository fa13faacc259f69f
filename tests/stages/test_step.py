"""A whole denoising step on a tiny decoder: against one sequence at a time, against itself with everything kept, and
against the same sequence in other company."""
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lmdeploy_focus.stages import step
from lmdeploy_focus.stages.decoder import KVCache
from lmdeploy_focus.stages.state import FocusState
from lmdeploy_focus.stages.unmask import UnmaskRule
from lmdeploy_focus.stages.view import CACHED, MASKED

from .. import oracle
from . import blocks, simulation
from .tiny_decoder import KV_HEADS, MASK_TOKEN, SIZE, VOCABULARY, TinyDecoder, caches

FOCUS = step.StepOptions(alpha=1.5, selection='top', keep=None, cache='delayed-neighbour', kv_visible='progress',
                         commit='uncached')
RULE = UnmaskRule('low_confidence_dynamic', .7, 4)
COLUMNS = 16


@dataclass
class Batch:
    """The engine's side: paged caches, ids, masks and state of S sequences."""
    decoder: TinyDecoder
    caches: list[KVCache]
    page_table: Tensor
    page_size: int
    ids: Tensor
    mask: Tensor
    history: Tensor
    state: FocusState

    def denoise(self, options: step.StepOptions, evicting: bool) -> step.Denoised:
        bound = int(self.history.max()) + 2 * self.ids.size(1)
        view = step.enter(self.ids, self.mask, self.state, self.history, self.page_table, self.page_size, bound,
                          options)
        return step.denoise(self.decoder, self.caches, view, self.state, options, evicting)

    def settle(self, denoised: step.Denoised, options: step.StepOptions) -> None:
        """Sample the masked kept rows; blocks that are committed begin anew."""
        kept = denoised.kept
        rows = kept.sequence[kept.masked] * kept.block_length + kept.position[kept.masked]
        tokens, scores = self.decoder.sample(denoised.hidden[0, kept.masked])
        self.ids, self.mask, self.state = step.settle(self.ids, self.mask, self.state, kept.rightmost(), rows, tokens,
                                                      scores, RULE, options)
        done = (self.mask == CACHED).all(1)
        self.state = self.state.restart(done)
        self.history = self.history + done * kept.block_length
        self.ids = torch.where(done[:, None], MASK_TOKEN, self.ids)
        self.mask = torch.where(done[:, None], MASKED, self.mask).to(torch.uint8)

    def text(self, half: Tensor, s: int) -> Tensor:
        """The keys or values of sequence s in the order of its text, written or not."""
        return half[self.page_table[s]].flatten(0, 1)

    def take(self, s: int) -> 'Batch':
        """Sequence s alone, with a copy of the caches."""
        one = slice(s, s + 1)
        return replace(self, caches=[(key.clone(), value.clone()) for key, value in self.caches],
                       page_table=self.page_table[one], ids=self.ids[one], mask=self.mask[one],
                       history=self.history[one], state=self.state.reindex(torch.tensor([s])))


def make(sequences: int, length: int, page_size: int, seed: int) -> Batch:
    """Blocks new, half decided by a prefill that has denoised them, and complete, after texts of various lengths."""
    random = torch.Generator().manual_seed(seed)
    history = torch.tensor([length * (s * 5 % 4) for s in range(sequences)])
    table = torch.randperm(sequences * COLUMNS, generator=random).view(sequences, COLUMNS)
    mask = torch.randint(0, 2, (sequences, length), generator=random, dtype=torch.uint8)
    mask[::3] = MASKED
    mask[5::7] = 1
    ids = torch.where(mask == MASKED, MASK_TOKEN, torch.randint(0, VOCABULARY - 1, mask.shape, generator=random))
    prefilled = (mask != MASKED).any(1)
    batch = Batch(TinyDecoder(seed), caches(sequences * COLUMNS, page_size), table, page_size, ids, mask, history,
                  FocusState.fresh(torch.where(prefilled, length - 1, -1)))
    for s, end in enumerate((history + prefilled * length).tolist()):
        place = torch.arange(end)
        for half in (half for cache in batch.caches for half in cache):
            half[table[s, place // page_size], place % page_size] = torch.randn(end, KV_HEADS, SIZE, generator=random)
    return batch


def simulate(batch: Batch, cache: str) -> list[simulation.Sequence]:
    """The same sequences for the golden model."""
    length = batch.ids.size(1)
    return [simulation.Sequence(int(batch.history[s]), batch.ids[s].tolist(), batch.mask[s].tolist(),
                                oracle.Block(length, cache, int(batch.state.progress[s])),
                                [(batch.text(key, s), batch.text(value, s)) for key, value in batch.caches])
            for s in range(len(batch.ids))]


def assert_same_caches(batch: Batch, sequences: list[simulation.Sequence]) -> None:
    """What was written is where it belongs, and nothing else was: evicted rows in the first two layers only."""
    for s, own in enumerate(sequences):
        for caches_of_layer, expected in zip(batch.caches, own.caches, strict=True):
            for half, text in zip(caches_of_layer, expected, strict=True):
                torch.testing.assert_close(batch.text(half, s), text, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('sequences,length,page_size,changes', [
    (1, 4, 64, {}), (3, 16, 16, {}), (17, 8, 16, {}), (3, 16, 8, {'kv_visible': 'reference'}),
    (3, 16, 64, {'cache': 'off'}), (3, 16, 64, {'cache': 'delayed'}), (3, 16, 64, {'commit': 'full'}),
    (3, 16, 64, {'keep': 3}), (3, 32, 64, {'alpha': 2.25})])
def test_steps_are_the_simulations(sequences, length, page_size, changes):
    """Twelve steps, over the ends of blocks: rows, importance, hidden states, tokens, state and every cache slot.

    Red when: a layer sees more or fewer keys than it should, or a stale one where a new one exists; evicted rows do not
    leave their KV in the first two layers, or leave one in the others; statistics or progress go astray.
    """
    options = replace(FOCUS, **changes)
    batch = make(sequences, length, page_size, seed=sequences + length)
    golden = simulate(batch, options.cache)
    evicted = 0
    for _ in range(12):
        denoised = batch.denoise(options, evicting=True)
        steps = [simulation.denoise(batch.decoder, own, options, evicting=True) for own in golden]
        for view, positions in ((denoised.entered, [one.entered for one in steps]),
                                (denoised.kept, [one.kept for one in steps])):
            assert [view.position[view.sequence == s].tolist() for s in range(sequences)] == positions
        for s, one in enumerate(steps):
            torch.testing.assert_close(denoised.delta[s, :len(one.delta)], torch.tensor(one.delta), rtol=0, atol=1e-4)
            hidden = denoised.hidden[0, denoised.kept.sequence == s]
            torch.testing.assert_close(hidden, one.hidden, rtol=1e-4, atol=1e-4)
        assert_same_caches(batch, golden)
        evicted += denoised.entered.num_rows - denoised.kept.num_rows
        batch.settle(denoised, options)
        for own, one in zip(golden, steps, strict=True):
            simulation.settle(batch.decoder, own, one, RULE.strategy, RULE.threshold)
            if own.mask == [oracle.CACHED] * length:
                own.begin()
        assert batch.ids.tolist() == [own.ids for own in golden]
        assert batch.history.tolist() == [own.history for own in golden]
        blocks.assert_same(batch.state, [own.block for own in golden], length)
    assert evicted > 0 or length == 4


@pytest.mark.parametrize('sequences,length', [(1, 4), (3, 16), (17, 16), (3, 64)])
@pytest.mark.parametrize('kv_visible', ['progress', 'reference'])
def test_everything_kept_is_the_step_without_eviction(sequences, length, kv_visible):
    """With focus_keep=L the eviction path runs and evicts nothing: the same bits as the delayed cache alone, step for
    step. Red when: compaction, the second view or the order of the layers changes a bit."""
    plain, focus = (make(sequences, length, 64, seed=length) for _ in range(2))
    options = replace(FOCUS, keep=length, kv_visible=kv_visible)
    for _ in range(8):
        expected, result = plain.denoise(options, evicting=False), focus.denoise(options, evicting=True)
        assert expected.delta is None and result.delta is not None
        assert result.kept.num_rows == result.entered.num_rows
        assert result.hidden.equal(expected.hidden)
        for one, other in zip(plain.caches, focus.caches, strict=True):
            assert one[0].equal(other[0]) and one[1].equal(other[1])
        plain.settle(expected, options)
        focus.settle(result, options)
        assert plain.ids.equal(focus.ids) and plain.mask.equal(focus.mask)


def test_rows_of_each_layer():
    """T rows up to layer 1's queries, N from its attention on; the head gets no more. Red when: a later layer runs
    evicted rows, or an earlier one leaves some out."""
    batch = make(17, 16, 64, seed=2)
    denoised = batch.denoise(FOCUS, evicting=True)
    entered, kept = denoised.entered.num_rows, denoised.kept.num_rows
    assert kept < entered
    assert denoised.hidden.shape[1] == kept == int(denoised.kept.rows_per_sequence().sum())
    assert [layer.seen for layer in batch.decoder.layers] == [
        [('queries', entered), ('finish', entered)], [('queries', entered), ('finish', kept)],
        [('queries', kept), ('finish', kept)]]


def test_company_does_not_matter():
    """Each of 17 sequences keeps the same rows and decodes the same tokens alone and in company, step for step.

    Red when: a budget, threshold or rank is taken over the batch, or a row reads another sequence's state.
    """
    batch = make(17, 16, 16, seed=4)
    for _ in range(6):
        alone = [batch.take(s) for s in range(17)]
        together = batch.denoise(FOCUS, evicting=True)
        batch.settle(together, FOCUS)
        for s, own in enumerate(alone):
            denoised = own.denoise(FOCUS, evicting=True)
            row = together.kept.sequence == s
            assert denoised.kept.position.tolist() == together.kept.position[row].tolist()
            torch.testing.assert_close(denoised.hidden[0], together.hidden[0, row], rtol=1e-4, atol=1e-4)
            own.settle(denoised, FOCUS)
            assert own.ids[0].equal(batch.ids[s]) and own.mask[0].equal(batch.mask[s])
