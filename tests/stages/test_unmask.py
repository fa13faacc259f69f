"""Unmasking against one block at a time: three strategies, evicted rows, ties, and scores that are not numbers; and the
head before it."""
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lmdeploy_focus.kernels.dispatch import kernels_for
from lmdeploy_focus.kernels.layout import Pace, Plan, Rows, report_columns, state_columns

from lmdeploy_focus.stages import unmask
from lmdeploy_focus.stages.decoder import Model
from lmdeploy_focus.stages.state import first_rows, pack_bits, unpack_bits
from lmdeploy_focus.stages.step_options import StepOptions
from lmdeploy_focus.stages.view import FocusView

from .. import oracle

STRATEGIES = ('low_confidence_dynamic', 'low_confidence_static', 'sequential')
# exact in float32, and the thresholds are among them: ties with the threshold are exact
SCORES = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0, math.nan)
MASK_TOKEN = 999
SEQUENCES = 50  # a call decides many cases at once


def options(strategy: str, per_step: int, cache: str = 'delayed-neighbour', commit: str = 'uncached') -> StepOptions:
    return StepOptions('top', None, cache, 'progress', commit, strategy, per_step, MASK_TOKEN, 10**6)


class Step:
    """A step of S blocks [S, L] whose rows have been run: which positions are masked, and which were kept."""

    def __init__(self, ids, masked, kept, threshold=.75):
        sequences, length = masked.shape
        one = torch.ones(sequences, dtype=torch.int64)
        table = first_rows(ids, masked, one * length, one * 10**6, one, one, 1.5, threshold)
        view = FocusView(table, one[:, None], -one[:, None], Pace.unlimited('cpu'), length, 10**6)
        view.entered, view.plan = (kind.empty(sequences, length, sequences * length, 'cpu') for kind in (Rows, Plan))
        view.entered.current.fill_(-1 if length == 64 else (1 << length) - 1)
        view.plan.current.copy_(pack_bits(kept | ~masked))
        view.plan.rightmost.copy_(torch.where(kept | ~masked, torch.arange(length), -1).amax(1))
        sampled = (kept & masked).nonzero()
        view.plan.sampled_sequence[:len(sampled)], view.plan.sampled_position[:len(sampled)] = sampled.T
        view.plan.sampled_start[1:] = (kept & masked).sum(1).cumsum(0)
        self.view, self.model = view, Model(None, None, [], kernels_for('cpu'))

    def settle(self, tokens, scores, settings):
        """The report's columns."""
        return report_columns(unmask.settle(self.model, self.view, settings, tokens, scores), self.view.length)


@st.composite
def steps(draw):
    """ids, masked and kept positions, tokens and scores of a batch; blocks new, partial, and nearly complete."""
    length = draw(st.sampled_from((4, 8, 16, 32, 64)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masked = random.integers(0, 2, size=(SEQUENCES, length)) > 0
    kind = random.integers(0, 4, size=SEQUENCES)
    masked[kind == 0], masked[kind == 1] = True, False
    masked[~masked.any(1), random.integers(length)] = True
    kept = masked & (random.random(masked.shape) < .6)
    kept[np.arange(SEQUENCES), masked.argmax(1)] |= ~kept.any(1)
    choices = np.array(SCORES[:draw(st.sampled_from((1, 3, len(SCORES))))], np.float32)
    scores = choices[random.integers(len(choices), size=masked.shape)]
    if draw(st.booleans()):
        scores = random.random(masked.shape).astype(np.float32)
    ids = np.where(masked, MASK_TOKEN, random.integers(0, 100, size=masked.shape))
    return tuple(map(torch.from_numpy, (ids, masked, kept, random.integers(100, 200, size=masked.shape), scores)))


@pytest.mark.parametrize('strategy', STRATEGIES)
@settings(max_examples=140, deadline=None, derandomize=True)
@given(step=steps(), threshold=st.sampled_from((.25, .75, 1.0)), denoising_steps=st.sampled_from((1, 3, 4, 64)),
       cache=st.sampled_from(('delayed-neighbour', 'delayed', 'off')), commit=st.sampled_from(('uncached', 'full')))
def test_every_block_is_the_oracles(strategy, step, threshold, denoising_steps, cache, commit):
    """21,000 blocks.

    Red when: the threshold is strict, the best token is not always taken, a tie goes to the larger position, an evicted
    or decoded position changes, static or sequential decide another number, or a NaN is believed; a position freezes
    too early or too late, the statistics count what was not decoded, or the next block does not begin at once.
    """
    ids, masked, kept, tokens, scores = step
    length = masked.size(1)
    per_step = math.ceil(length / denoising_steps)
    own = Step(ids, masked, kept, threshold)
    report = own.settle(tokens[kept], scores[kept], options(strategy, per_step, cache, commit))
    left = unpack_bits(report.masked, length)
    state = state_columns(own.view.table, length)
    whole = (1 << length) - 1
    for s in range(SEQUENCES):
        before = [oracle.MASKED if waits else oracle.UNMASKED for waits in masked[s].tolist()]
        sampled = {p: (int(tokens[s, p]), float(scores[s, p])) for p in kept[s].nonzero()[:, 0].tolist()}
        expected, after = oracle.unmask(ids[s].tolist(), before, sampled, strategy, threshold, per_step)
        block = oracle.Block(length, cache)
        block.advance(before, after, int(own.view.plan.rightmost[s]))
        assert report.ids[s].tolist() == expected
        assert left[s].tolist() == [m == oracle.MASKED for m in after]
        assert report.newly[s] == block.decoded
        uncached = sum(1 << p for p in block.uncached())
        if oracle.MASKED in after:
            assert state.ids[s].tolist() == expected and state.history[s] == length
            assert (state.uncached[s].item() & whole, state.pending[s].item()) == (uncached, 0)
            assert [state.progress[s], state.decoded[s], state.steps[s]] == [block.progress, block.decoded, block.steps]
        else:
            assert state.pending_ids[s].tolist() == expected and state.history[s] == 2 * length
            assert state.ids[s].tolist() == [MASK_TOKEN] * length and state.masked[s].item() & whole == whole
            assert state.pending[s].item() & whole == (uncached if commit == 'uncached' and cache != 'off' else whole)
            assert [state.progress[s], state.decoded[s], state.steps[s]] == [-1, 0, 0]


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('score', [0.0, 1.0, math.nan])
def test_a_block_always_moves_on(strategy, score):
    """A block of 32 in 8 steps of 4; dynamic takes one token a step where none is confident. Red when: zero or NaN
    confidence decides nothing: the sequence would never end."""
    left, steps, ids = 32, 0, torch.full((1, 32), MASK_TOKEN)
    waiting = torch.ones(1, 32, dtype=torch.bool)
    while left:
        report = Step(ids, waiting, waiting).settle(waiting[0].nonzero()[:, 0] + 100, torch.full((left,), score),
                                                    options(strategy, 4))
        ids, waiting = report.ids.clone(), unpack_bits(report.masked, 32)
        steps += 1
        assert int(waiting.sum()) < left
        left = int(waiting.sum())
    slow = strategy == 'low_confidence_dynamic' and not score >= .75
    assert steps == (32 if slow else 1 if strategy == 'low_confidence_dynamic' else 8)
    assert ids[0].tolist() == list(range(100, 132))


def test_unknown_strategy():
    """Red when: an unknown strategy falls back to another in silence."""
    masked = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="strategy='best'"):
        Step(masked.long(), masked, masked).settle(torch.zeros(4, dtype=torch.int64), torch.zeros(4),
                                                   options('best', 1))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_confidence_is_the_softmax(dtype):
    """Red when: the softmax is taken in the logits' dtype, or of another token."""
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(17, 1000, generator=random) * 5).to(dtype)
    logits[:, 7] = float('-inf')
    tokens = torch.randint(0, 1000, (17,), generator=random)
    result = unmask.confidence(logits, tokens)
    assert result.dtype == torch.float32
    expected = logits.double().softmax(-1)[torch.arange(17), tokens]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-12)
    assert unmask.confidence(logits[:0], tokens[:0]).shape == (0,)
    assert unmask.confidence(torch.full((1, 4), float('nan')), torch.tensor([0])).isnan().all()


@pytest.mark.parametrize('rows', [0, 1, 8, 13, 40])
def test_sampled_in_pieces(rows, monkeypatch):
    """The head runs on so many rows at a time, with the padding of a bucket behind the last. Red when: a piece takes
    another's hidden states, sequences or positions, or does not know where the real rows end."""
    monkeypatch.setattr(unmask, '_CHUNK', 8)
    masked = torch.ones(3, 4, dtype=torch.bool)
    step = Step(masked.long(), masked, masked)
    step.view.plan.sampled = torch.randperm(64)
    for name in ('sampled_sequence', 'sampled_position'):
        setattr(step.view.plan, name, torch.cat([getattr(step.view.plan, name), torch.zeros(52, dtype=torch.int64)]))
    step.model.head = lambda hidden: hidden * 2
    real = []

    def sampler(logits, count, sequence, position):
        real.extend((torch.arange(len(logits)) < count).tolist())
        return (logits[:, 0] * 100 + sequence * 10 + position).long(), logits[:, 0]

    tokens, scores = unmask.sample(step.model, step.view, torch.arange(64.)[:, None], rows, sampler)
    hidden = step.view.plan.sampled[:rows] * 2
    assert scores.tolist() == hidden.tolist()
    places = step.view.plan.sampled_sequence * 10 + step.view.plan.sampled_position
    assert tokens.tolist() == (hidden * 100 + places[:rows]).tolist()
    assert real == [row < 12 for row in range(rows)]
