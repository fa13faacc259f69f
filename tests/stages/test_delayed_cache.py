"""The delayed cache over whole blocks: when a position freezes, and what always enters a step."""
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmdeploy_focus.stages import delayed_cache
from lmdeploy_focus.stages.state import FocusState, pack_bits, unpack_bits
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED

from .. import oracle
from . import blocks

RULES = ('delayed-neighbour', 'delayed', 'off')


class DelayedCache(RuleBasedStateMachine):
    """Sequences that denoise block after block, beside the oracle and a record of what every position went through."""

    @initialize(length=st.sampled_from((4, 8, 16, 32, 64)), sequences=st.sampled_from((1, 3, 17)),
                cache=st.sampled_from(RULES), full=st.booleans(), dense=st.booleans(), seed=st.integers(0, 2**32 - 1))
    def start(self, length, sequences, cache, full, dense, seed):
        self.length, self.cache, self.full = length, cache, full
        self.random = np.random.default_rng(seed)
        progress = length - 1 if dense else -1  # a block that prefill has denoised, or a new one
        self.mask = torch.from_numpy(self.random.integers(0, 2, size=(sequences, length)) * dense).to(torch.uint8)
        self.state = FocusState.fresh(torch.full((sequences,), progress))
        self.blocks = [oracle.Block(length, cache, progress) for _ in range(sequences)]
        shape = (sequences, length)
        self.ran = torch.full(shape, dense)  # has been through all layers in this block
        self.known = torch.zeros(shape, dtype=torch.bool)  # it and its right neighbour were decoded on some input
        self.freezes = torch.zeros(shape, dtype=torch.int64)

    @rule()
    def step(self):
        """One step of all sequences."""
        mask, state, length = self.mask, self.state, self.length
        entering = delayed_cache.entering(state, mask, self.cache, self.full)
        assert [row.nonzero()[:, 0].tolist() for row in entering] == [
            block.entering(row, self.full) for block, row in zip(self.blocks, mask.tolist(), strict=True)]
        self.check_entering(entering)

        kept = blocks.evict(entering, mask, state.progress, self.random)
        self.check_visible(entering, kept)
        self.ran |= kept
        after = blocks.decode(mask, kept, self.random)
        right = blocks.rightmost(kept)
        self.state = delayed_cache.advance(state, mask, after, right, self.cache)
        for block, before, then, last in zip(self.blocks, mask.tolist(), after.tolist(), right.tolist(), strict=True):
            block.advance(before, then, last)
        blocks.assert_same(self.state, self.blocks, length)
        self.check_frozen(entering)
        assert (self.state.progress >= state.progress).all()
        self.mask = after
        self.begin_blocks()

    def check_entering(self, entering):
        """Every masked position enters, and nothing else than what is not frozen, except a full commit's block."""
        assert entering.any(1).all()
        assert entering[self.mask == MASKED].all()
        commit = (self.mask == UNMASKED).all(1, keepdim=True) & self.full
        assert not (entering & (self.freezes > 0) & ~commit).any()

    def check_visible(self, entering, kept):
        """No layer reads a KV that was never written, and no valid one is hidden by rule 'progress'."""
        none = torch.zeros(len(kept), dtype=torch.int64)
        place = torch.arange(self.length)
        seen = delayed_cache.visible(none, blocks.rightmost(entering), self.state, 'progress')
        assert (seen == self.length).all()  # layer 0 and a step without eviction see the whole block
        seen = delayed_cache.visible(none, blocks.rightmost(kept), self.state, 'progress')
        assert ((self.ran | kept) == (place < seen[:, None])).all()
        seen = delayed_cache.visible(none, blocks.rightmost(kept), self.state, 'reference')
        assert ((self.ran | kept) | (place >= seen[:, None])).all()

    def check_frozen(self, entering):
        """Frozen exactly once, in the first step in which the position (and its right neighbour) entered decoded."""
        decoded = self.mask != MASKED
        known = decoded.clone()
        if self.cache == 'delayed-neighbour':
            known[:, :-1] &= decoded[:, 1:]
        frozen = ~unpack_bits(self.state.uncached, self.length)
        fresh = frozen & (self.freezes == 0)
        self.freezes += fresh
        self.known |= known
        if self.cache == 'off':
            assert not frozen.any()
        else:
            assert frozen.equal(self.known)
            assert not (fresh & ~entering).any()
        # never thawed: what was counted once is still frozen
        assert not ((self.freezes > 0) & ~frozen).any()

    def begin_blocks(self):
        """Sequences whose block is committed start the next one."""
        done = (self.mask == CACHED).all(1)
        if self.cache != 'off':
            assert (self.freezes[done] == 1).all()
        self.state = self.state.restart(done)
        self.mask[done] = MASKED
        self.ran[done] = self.known[done] = False
        self.freezes[done] = 0
        self.blocks = [oracle.Block(self.length, self.cache) if over else block
                       for over, block in zip(done.tolist(), self.blocks, strict=True)]


# 5,200 steps of 1, 3 or 17 sequences. Red when: a position freezes without its right neighbour, or later than it may;
# the last one waits for a neighbour that does not exist; a masked position is left out; progress falls; statistics
# count a step that decoded nothing; a new block starts with the old one's state; a key is read that was never written.
TestDelayedCache = DelayedCache.TestCase
TestDelayedCache.settings = settings(max_examples=104, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.parametrize('length', [1, 4, 32, 63, 64])
def test_bits(length):
    """Red when: position 63, the sign of an int64, is lost or spreads over other positions."""
    random = torch.Generator().manual_seed(length)
    flags = torch.rand(200, length, generator=random) < torch.rand(200, 1, generator=random)
    flags[0], flags[1] = True, False
    flags[2], flags[2, -1] = False, True
    packed = pack_bits(flags)
    assert packed.dtype == torch.int64
    assert unpack_bits(packed, length).equal(flags)
    assert [bits % 2**64 for bits in packed.tolist()] == [
        sum(1 << i for i, flag in enumerate(row) if flag) for row in flags.tolist()]
    assert unpack_bits(packed & ~pack_bits(flags), length).sum() == 0


@pytest.mark.parametrize('cache', RULES)
def test_the_three_rules(cache):
    """Positions 0, 1, 3 and 7 of 8 were decoded on input. Red when: two rules are the same."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 0, 1]], dtype=torch.uint8)
    state = delayed_cache.advance(FocusState.fresh(torch.tensor([-1])), mask, mask, torch.tensor([7]), cache)
    frozen = {'delayed-neighbour': [0, 7], 'delayed': [0, 1, 3, 7], 'off': []}[cache]
    assert (~unpack_bits(state.uncached, 8)).nonzero()[:, 1].tolist() == frozen
    assert (state.decoded.item(), state.steps.item()) == (0, 0)


def test_full_commit():
    """Red when: a finished block is not run as a whole, or a block that still waits for tokens is."""
    state = FocusState.fresh(torch.tensor([7, 7, 7]))
    state.uncached = pack_bits(torch.tensor([[False] * 5 + [True] * 3, [False] * 5 + [True] * 3, [False] * 8]))
    mask = torch.tensor([[1] * 8, [1] * 7 + [0], [1] * 8], dtype=torch.uint8)
    for full, expected in ((True, [8, 3, 8]), (False, [3, 3, 8])):
        assert delayed_cache.entering(state, mask, 'delayed-neighbour', full).sum(1).tolist() == expected
