"""The delayed cache over whole blocks: when a position freezes, what enters a step, and how a block is committed."""
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from lmdeploy_focus.kernels import reference_enter, reference_plan, reference_settle
from lmdeploy_focus.kernels.layout import Pace

from lmdeploy_focus.stages.state import FocusState, first_rows, pack_bits, unpack_bits

from ..kernels.block_life import Rules
from . import blocks

RULES = ('delayed-neighbour', 'delayed', 'off')
SEEDS = st.integers(0, 2**32 - 1)


class DelayedCache(RuleBasedStateMachine):
    """Sequences that denoise block after block, beside their lives and a record of what every position went through."""

    @initialize(length=st.sampled_from((4, 8, 16, 32, 64)), sequences=st.sampled_from((1, 3, 17)),
                cache=st.sampled_from(RULES), full=st.booleans(), prompt=st.booleans(), seed=SEEDS)
    def start(self, length, sequences, cache, full, prompt, seed):
        self.length, self.cache, self.full = length, cache, full
        self.random = np.random.default_rng(seed)
        rules = Rules(length, cache=cache, full_commit=full)
        lives = [blocks.fresh(rules, int(self.random.integers(length)) * prompt, s % 3, self.random, stops=False)
                 for s in range(sequences)]
        state = FocusState(sequences, length, 'cpu')
        state.append(blocks.first(lives))
        self.batch = blocks.Batch(rules, state)
        self.batch.lives = lives
        self.known: list[set[int]] = [set() for _ in lives]  # it and its right neighbour were decoded on some input
        self.ran: list[set[int]] = [set() for _ in lives]  # has been through all layers in this block

    @rule(steps=st.integers(1, 12), share=st.sampled_from((1, 1, .5)))
    def step(self, steps, share):
        """Steps of all sequences that fit."""
        most = 2 * self.length * len(self.batch.lives)
        for _ in range(steps):
            before = self.read()
            walk = self.batch.step(self.random, tuple(round(share * most) for _ in range(3)))
            for s, own in enumerate(before):
                if walk.kept[s]:
                    self.check_entering(s, own, walk)
                    self.check_visible(s, own, walk)
                    self.check_after(s, own)

    def read(self):
        """The state before a step, by sequence, positions as sets."""
        columns = self.batch.state.columns
        maps = {name: [{*row.nonzero()[:, 0].tolist()} for row in unpack_bits(getattr(columns, name), self.length)]
                for name in ('masked', 'uncached', 'pending')}
        return [{name: sets[s] for name, sets in maps.items()} | {'history': int(columns.history[s]),
                                                                  'progress': int(columns.progress[s])}
                for s in range(len(self.batch.lives))]

    def check_entering(self, s, own, walk):
        """Every masked position enters, and nothing that is frozen."""
        assert walk.entered[s] == own['uncached'] >= own['masked']
        assert own['masked'], 'a block without a masked position is over'
        assert walk.pending[s] == own['pending']

    def check_visible(self, s, own, walk):
        """No layer reads a KV that was never written, and no valid one is hidden; a commit sees its own block alone."""
        for rows, inside in ((walk.rows, self.ran[s] | walk.entered[s]), (walk.plan, self.ran[s] | walk.kept[s])):
            mine = slice(int(rows.start[s]), int(rows.start[s + 1]))
            seen, position = rows.visible[mine] - own['history'], rows.position[mine]
            assert seen[position < 0].eq(0).all()
            assert {*seen[position >= 0].tolist()} == {len(inside)} and inside == {*range(len(inside))}
        assert int(walk.rows.visible[int(walk.rows.start[s + 1]) - 1]) == own['history'] + self.length

    def check_after(self, s, own):
        """Frozen exactly once: in the first step in which the position (and its right neighbour) entered decoded, or
        with the commit of its block."""
        now, length = self.read()[s], self.length
        decoded = {p for p in range(length) if p not in own['masked']}
        if self.cache == 'delayed-neighbour':
            self.known[s] |= {p for p in decoded if p + 1 in decoded or p == length - 1}
        if self.cache == 'delayed':
            self.known[s] |= decoded
        rolled = now['history'] > own['history']
        frozen = {*range(length)} - (now['pending'] if rolled else now['uncached'])
        if rolled and (self.full or self.cache == 'off'):
            assert frozen == set()
        else:
            assert frozen == self.known[s]
        if rolled:
            assert now['history'] == own['history'] + length
            assert (now['masked'], now['uncached'], now['progress']) == ({*range(length)}, {*range(length)}, -1)
            self.ran[s], self.known[s] = set(), set()
        else:
            assert now['pending'] == set() and now['progress'] >= own['progress']
            self.ran[s] = {*range(now['progress'] + 1)}


# 40 batches of up to 17 texts, thousands of steps of a sequence. Red when: a position freezes without its right
# neighbour, or later than it may; the last one waits for a neighbour that does not exist; a masked position is left
# out; progress falls; a new block starts with the old one's state; a key is read that was never written; a position is
# left out of its block's commit, or committed though it is frozen, or again; a commit sees the block that follows.
TestDelayedCache = DelayedCache.TestCase
TestDelayedCache.settings = settings(max_examples=25, stateful_step_count=5, deadline=None, derandomize=True)


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
@pytest.mark.parametrize('full', [False, True])
def test_the_rules_by_hand(cache, full):
    """Positions 0, 1, 3 and 7 of 8 are decoded on input; then all are, and what is not frozen is committed. Red when:
    two rules are the same, or a full commit leaves something out."""
    rules = Rules(8, 'low_confidence_static', 1, cache, full)
    state = FocusState(1, 8, 'cpu')
    mask = torch.tensor([[False, False, True, False, True, True, True, False]])
    one = torch.ones(1, dtype=torch.int64)
    state.append(first_rows(torch.zeros(1, 8, dtype=torch.int64), mask, 8 * one, 99 * one, 8 * one, one, 1.5, .75))
    for per_step, frozen in ((0, {'delayed-neighbour': [0, 7], 'delayed': [0, 1, 3, 7], 'off': []}),
                             (4, {'delayed-neighbour': [0, 7], 'delayed': [0, 1, 3, 7], 'off': []})):
        rows = reference_enter.enter(state.table, one[:, None], 99, Pace.unlimited('cpu'), 8)
        flat = torch.zeros(1, 1, 8)
        plan = reference_plan.plan(flat, flat, state.table, rows, Pace.unlimited('cpu'), 8, keep=8)
        reference_settle.settle(state.table, rows, plan, Pace.unlimited('cpu'), one.repeat(4), torch.ones(4),
                                -one[:, None], 7, **rules.options() | {'tokens_per_step': per_step})
        uncached = state.columns.pending if per_step else state.columns.uncached
        expected = [] if per_step and full else frozen[cache]
        assert (~unpack_bits(uncached, 8)).nonzero()[:, 1].tolist() == expected
    assert state.columns.history.tolist() == [16] and state.columns.pending_ids.tolist() == [[0, 0, 1, 0, 1, 1, 1, 0]]
