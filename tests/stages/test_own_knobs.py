"""Each sequence's own alpha and threshold, beside a plain list, while sequences come and go and modes change."""
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmdeploy_focus.stages.state import FocusState, first_rows

MOST, LENGTH = 7, 4
ALPHAS, THRESHOLDS = st.floats(1, 64), st.floats(0, 1, exclude_min=True)


def rows_of(knobs):
    """Rows of new sequences with these alphas and thresholds."""
    one = torch.ones(len(knobs), dtype=torch.int64)
    alpha, threshold = torch.tensor(knobs, dtype=torch.float64).unbind(1)
    return first_rows(one[:, None].repeat(1, LENGTH), torch.ones(len(knobs), LENGTH, dtype=torch.bool), one, one, one,
                      one, alpha, threshold)


class Batch(RuleBasedStateMachine):
    """What each sequence came with, and what it decides by."""

    @initialize()
    def start(self):
        self.state = FocusState(MOST, LENGTH, 'cpu')
        self.own, self.now = [], []

    @precondition(lambda self: self.state.count < MOST)
    @rule(knobs=st.lists(st.tuples(ALPHAS, THRESHOLDS), min_size=1, max_size=3))
    def arrive(self, knobs):
        """Until a mode decides again, they decide by their own."""
        knobs = knobs[:MOST - self.state.count]
        self.state.append(rows_of(knobs))
        self.own, self.now = self.own + knobs, self.now + knobs

    @precondition(lambda self: self.state.count)
    @rule(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
    def depart(self, seed, share):
        """Some leave; the rest change places."""
        order = np.random.default_rng(seed).permutation(self.state.count)
        order = order[:round(share * len(order))]
        if len(order):
            self.state.take(torch.from_numpy(order))
        else:
            self.state.clear()
        self.own, self.now = ([them[i] for i in order] for them in (self.own, self.now))

    @rule(alpha=st.none() | ALPHAS, threshold=st.just(0.0) | THRESHOLDS)
    def decide(self, alpha, threshold):
        """A mode for all; its threshold is a bound."""
        self.state.decide_by(alpha, threshold)
        self.now = [(own if alpha is None else alpha, max(least, threshold)) for own, least in self.own]

    @invariant()
    def rows_are_the_sequences(self):
        """Whatever the order of events."""
        assert self.state.own[:self.state.count].tolist() == [list(pair) for pair in self.own]
        columns = self.state.columns
        assert list(zip(columns.alpha.tolist(), columns.threshold.tolist(), strict=True)) == self.now


# Red when: own values do not go with their sequence through append or take, a mode writes over them, its threshold is
# no lower bound, or a switch back gives a sequence the engine's values, another's, or the mode's.
TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=80, stateful_step_count=15, deadline=None, derandomize=True)
