"""FocusState beside one simulation a sequence, under random arrivals and departures."""
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmdeploy_focus.stages import delayed_cache
from lmdeploy_focus.stages.state import FocusState
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED

from .. import oracle
from . import blocks

SEEDS = st.integers(0, 2**32 - 1)


class Batch(RuleBasedStateMachine):
    """A batch whose rows come, go, change places and step; each row is also an oracle of its own."""

    @initialize(length=st.sampled_from((4, 16, 32, 64)), cache=st.sampled_from(('delayed-neighbour', 'delayed', 'off')))
    def start(self, length, cache):
        self.length, self.cache = length, cache
        self.state = FocusState.fresh(torch.zeros(0, dtype=torch.int64))
        self.mask = torch.zeros(0, length, dtype=torch.uint8)
        self.rows: list[oracle.Block] = []

    @precondition(lambda self: len(self.rows) < 20)
    @rule(dense=st.lists(st.booleans(), min_size=1, max_size=6), seed=SEEDS)
    def arrive(self, dense, seed):
        """Prefilled sequences: with a block of masks, or with a partial one that prefill has denoised."""
        random = np.random.default_rng(seed)
        progress = [self.length - 1 if partial else -1 for partial in dense]
        self.state = self.state.merge(FocusState.fresh(torch.tensor(progress)))
        mask = random.integers(0, 2, size=(len(dense), self.length)) * np.array(dense)[:, None]
        self.mask = torch.cat([self.mask, torch.from_numpy(mask).to(torch.uint8)])
        self.rows += [oracle.Block(self.length, self.cache, value) for value in progress]

    @precondition(lambda self: self.rows)
    @rule(seed=SEEDS, share=st.floats(0, 1))
    def depart(self, seed, share):
        """Some leave, the rest come back in another order."""
        order = np.random.default_rng(seed).permutation(len(self.rows))
        order = order[:round(share * len(order))]
        self.state = self.state.reindex(torch.from_numpy(order))
        self.mask = self.mask[order]
        self.rows = [self.rows[i] for i in order]

    @precondition(lambda self: self.rows)
    @rule(seed=SEEDS)
    def step(self, seed):
        """A denoising step; blocks that are committed begin anew."""
        random, state, mask = np.random.default_rng(seed), self.state, self.mask
        entering = delayed_cache.entering(state, mask, self.cache, False)
        kept = blocks.evict(entering, mask, state.progress, random)
        after = blocks.decode(mask, kept, random)
        right = blocks.rightmost(kept)
        state = delayed_cache.advance(state, mask, after, right, self.cache)
        done = (after == CACHED).all(1)
        self.state = state.restart(done)
        self.mask = torch.where(done[:, None], MASKED, after).to(torch.uint8)
        for i, row in enumerate(self.rows):
            row.advance(mask[i].tolist(), after[i].tolist(), int(right[i]))
            if all(m == UNMASKED for m in mask[i].tolist()):
                self.rows[i] = oracle.Block(self.length, self.cache)

    @invariant()
    def rows_are_the_oracles(self):
        """Whatever the order of events."""
        blocks.assert_same(self.state, self.rows, self.length)


# 6,000 events in 200 interleavings. Red when: a field is left out of merge, reindex or restart, rows are appended in
# front, an order is sorted, a restart reaches a row that is not finished or keeps its progress or statistics.
TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


def test_operations_do_not_share_memory():
    """Steps in flight hold older states. Red when: merge, reindex, restart or advance writes into its operand."""
    state = FocusState.fresh(torch.tensor([-1, 3]))
    before = [value.clone() for value in vars(state).values()]
    merged = state.merge(FocusState.fresh(torch.tensor([7])))
    mask = torch.ones(2, 4, dtype=torch.uint8)
    for other in (merged, state.reindex(torch.tensor([1, 0])), state.restart(torch.tensor([True, False])),
                  delayed_cache.advance(state, mask, mask, torch.tensor([3, 3]), 'delayed')):
        for value in vars(other).values():
            value.fill_(99)
    assert all(value.equal(old) for value, old in zip(vars(state).values(), before, strict=True))
