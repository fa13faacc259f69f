"""FocusState beside one life a sequence, under random arrivals and departures, with steps in which some wait."""
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmdeploy_focus.kernels.layout import FIELDS, state_width

from lmdeploy_focus.stages.state import FocusState, first_rows

from ..kernels.block_life import Rules
from . import blocks

SEEDS = st.integers(0, 2**32 - 1)
MOST = 9


class Batch(RuleBasedStateMachine):
    """A batch whose rows come, go, change places and step; each row is also a life of its own."""

    @initialize(length=st.sampled_from((4, 16, 32, 64)), cache=st.sampled_from(('delayed-neighbour', 'delayed', 'off')),
                strategy=st.sampled_from(('low_confidence_dynamic', 'low_confidence_static', 'sequential')),
                full=st.booleans())
    def start(self, length, cache, strategy, full):
        self.rules = Rules(length, strategy, max(1, length // 8), cache, full)
        self.state = FocusState(MOST, length, 'cpu')
        self.address = self.state.table.data_ptr()
        self.batch = blocks.Batch(self.rules, self.state)

    @precondition(lambda self: self.state.count < MOST)
    @rule(prompts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4), seed=SEEDS)
    def arrive(self, prompts, seed):
        """Prefilled sequences, whose prompt ends with a block or amid one."""
        random = np.random.default_rng(seed)
        lives = [blocks.fresh(self.rules, int(part * self.rules.length), int(random.integers(4)), random)
                 for part in prompts[:MOST - self.state.count]]
        self.state.append(blocks.first(lives))
        self.batch.lives += lives

    @precondition(lambda self: self.state.count)
    @rule(seed=SEEDS, share=st.floats(0, 1))
    def depart(self, seed, share):
        """Some leave, those that have stopped among them or not; the rest change places."""
        order = np.random.default_rng(seed).permutation(self.state.count)
        order = order[:round(share * len(order))]
        if len(order) or seed % 2:
            self.state.take(torch.from_numpy(order))
        else:
            self.state.clear()
        self.batch.lives = [self.batch.lives[i] for i in order]

    @precondition(lambda self: self.state.count)
    @rule(seed=SEEDS, steps=st.integers(1, 8), share=st.sampled_from((1., 1., .7, .3)))
    def step(self, seed, steps, share):
        """Steps of all that fit."""
        random, most = np.random.default_rng(seed), 2 * self.rules.length * self.state.count
        for _ in range(steps):
            self.batch.step(random, tuple(round(share * most / part) + (share == 1) * most for part in (1, 3, 6)))

    @invariant()
    def rows_are_the_lives(self):
        """Whatever the order of events, and where the graphs look for them."""
        self.batch.check()
        assert self.state.table.data_ptr() == self.address


# 90 interleavings of 12 events, of which many are several steps. Red when: a column is left out of append or take, rows
# are appended in front, an order is sorted, a row that has left stays alive, the pending block or its tokens go with
# another sequence or are committed twice, a sequence that waits loses or gains anything, one stops too early or too
# late, a new block keeps its predecessor's progress or statistics, or the table moves.
TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=90, stateful_step_count=12, deadline=None, derandomize=True)


def test_a_new_sequence():
    """Every column of a row at the start of a block. Red when: a column is forgotten, or prefill's KV of masked
    positions counts as having been through the layers."""
    masked = torch.tensor([[False, True, True, True], [True] * 4])
    one, two = (torch.tensor(pair) for pair in ([4, 8], [7, 9]))
    rows = FocusState(5, 4, 'cpu')
    rows.append(first_rows(torch.tensor([[5, 9, 9, 9], [9] * 4]), masked, one, two, one + 1, two + 1, 1.1, .8))
    assert rows.count == 2 and rows.table.shape == (5, state_width(4)) and rows.table[2:].eq(0).all()
    columns = rows.columns
    expected = {'ids': [[5, 9, 9, 9], [9] * 4], 'pending_ids': [[0] * 4] * 2, 'masked': [14, 15], 'uncached': [-1, -1],
                'pending': [0, 0], 'progress': [-1, -1], 'decoded': [0, 0], 'steps': [0, 0], 'history': [4, 8],
                'appendable': [7, 9], 'random_offset': [8, 10], 'output_start': [5, 9], 'alive': [1, 1],
                'alpha': [1.1, 1.1], 'threshold': [.8, .8]}
    assert set(expected) == {*FIELDS, 'ids', 'pending_ids'}
    for name, values in expected.items():
        assert getattr(columns, name).tolist() == values, name
