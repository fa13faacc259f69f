"""Unmasking against one block at a time: three strategies, evicted rows, ties, and scores that are not numbers."""
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lmdeploy_focus.stages.unmask import UnmaskRule, confidence, unmask
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED

from .. import oracle

STRATEGIES = ('low_confidence_dynamic', 'low_confidence_static', 'sequential')
# exact in float32, and the thresholds of the rule are among them: ties with the threshold are exact
SCORES = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0, math.nan)


@st.composite
def steps(draw):
    """ids, mask, sampled rows, tokens and scores of a batch; blocks new, partial, complete and cached."""
    length = draw(st.sampled_from((4, 8, 16, 32, 64)))
    sequences = draw(st.sampled_from((1, 3, 17)))
    prefill = draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.integers(0, 2, size=(sequences, length))
    kind = random.integers(0, 5, size=sequences)
    mask[kind == 0], mask[kind == 1], mask[kind == 2] = MASKED, UNMASKED, CACHED
    sampled = np.ones_like(mask, dtype=bool) if prefill else (mask == MASKED) & (random.random(mask.shape) < .6)
    rows = np.flatnonzero(sampled)
    if not prefill:
        rows = random.permutation(rows)
    choices = np.array(SCORES[:draw(st.sampled_from((1, 3, len(SCORES))))], np.float32)
    scores = choices[random.integers(len(choices), size=rows.shape)]
    if draw(st.booleans()):
        scores = random.random(rows.shape).astype(np.float32)
    return (torch.from_numpy(random.integers(0, 100, size=mask.shape)), torch.from_numpy(mask.astype(np.uint8)),
            torch.from_numpy(rows), torch.from_numpy(random.integers(100, 200, size=rows.shape)),
            torch.from_numpy(scores))


def run(strategy, ids, mask, rows, tokens, scores, threshold=.75, denoising_steps=4):
    return unmask(ids, mask, rows, tokens, scores, UnmaskRule(strategy, threshold, denoising_steps))


@pytest.mark.parametrize('strategy', STRATEGIES)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(step=steps(), threshold=st.sampled_from((.25, .75, 1.0)), denoising_steps=st.sampled_from((1, 3, 4, 64)))
def test_every_block_is_the_oracles(strategy, step, threshold, denoising_steps):
    """Prefill samples all rows, decode some of the masked ones in any order; 300 batches a strategy.

    Red when: the threshold is strict, the best token is not always taken, a tie goes to the larger position, an evicted
    or decoded position changes, a finished block is not CACHED or a CACHED one changes, static or sequential decide
    another number, or a NaN is believed.
    """
    ids, mask, rows, tokens, scores = step
    length = mask.size(1)
    before = ids.clone(), mask.clone()
    new_ids, new_mask = run(strategy, ids, mask, rows, tokens, scores, threshold, denoising_steps)
    assert new_ids.dtype == torch.int64 and new_mask.dtype == torch.uint8
    assert ids.equal(before[0]) and mask.equal(before[1])
    sampled = [{} for _ in range(len(mask))]
    for row, token, score in zip(rows.tolist(), tokens.tolist(), scores.tolist(), strict=True):
        sampled[row // length][row % length] = (token, score)
    for s, own in enumerate(sampled):
        expected = oracle.unmask(ids[s].tolist(), mask[s].tolist(), own, strategy, threshold,
                                 math.ceil(length / denoising_steps))
        assert (new_ids[s].tolist(), new_mask[s].tolist()) == expected


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('score', [0.0, 1.0, math.nan])
def test_a_block_always_moves_on(strategy, score):
    """A block of 32 in 8 steps of 4; dynamic takes one token a step where none is confident. Red when: zero or NaN
    confidence decides nothing: the sequence would never end."""
    ids, mask = torch.zeros(1, 32, dtype=torch.int64), torch.zeros(1, 32, dtype=torch.uint8)
    steps = 0
    while left := int((mask == MASKED).sum()):
        rows = (mask[0] == MASKED).nonzero()[:, 0]
        ids, mask = run(strategy, ids, mask, rows, rows + 100, torch.full((left,), score), denoising_steps=8)
        steps += 1
        assert (mask == MASKED).sum() < left
    slow = strategy == 'low_confidence_dynamic' and not score >= .75
    assert steps == (32 if slow else 1 if strategy == 'low_confidence_dynamic' else 8)
    assert ids[0].tolist() == list(range(100, 132))
    none = torch.zeros(0, dtype=torch.int64)
    _, mask = run(strategy, ids, torch.full_like(mask, UNMASKED), none, none, none.float())
    assert mask.eq(CACHED).all()


def test_unknown_strategy():
    """Red when: an unknown strategy falls back to another in silence."""
    ids, none = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="dllm_unmasking_strategy='best'"):
        run('best', ids, ids.to(torch.uint8), none, none, none.float())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_confidence_is_the_softmax(dtype):
    """Red when: the softmax is taken in the logits' dtype, or of another token."""
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(17, 1000, generator=random) * 5).to(dtype)
    logits[:, 7] = float('-inf')
    tokens = torch.randint(0, 1000, (17,), generator=random)
    result = confidence(logits, tokens)
    assert result.dtype == torch.float32
    expected = logits.double().softmax(-1)[torch.arange(17), tokens]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-12)
    assert confidence(logits[:0], tokens[:0]).shape == (0,)
    assert confidence(torch.full((1, 4), float('nan')), torch.tensor([0])).isnan().all()
