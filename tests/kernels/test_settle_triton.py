"""The twin of settle beside one sequence's life in plain Python, and the Triton settle beside both."""
import copy

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from lmdeploy_focus.kernels import reference_settle
from lmdeploy_focus.kernels.settle import settle

from .. import oracle
from . import settle_checks as checks
from .block_life import Batch, Draws, Life, Rules
from .interpreter import run_interpreted

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)


@st.composite
def lives(draw, rules):
    """A sequence somewhere in its text: prompt tokens in the block, stop words among them or not, caps around it."""
    length, vocabulary = rules.length, 60
    prompt = draw(st.integers(0, length))
    history = draw(st.integers(0, 3)) * length
    ids = draw(st.lists(st.integers(0, vocabulary), min_size=prompt, max_size=prompt))
    around = st.one_of(st.integers(-2, length + 2), st.sampled_from([0, length - 1, length, length + 1]),
                       st.integers(length, 3 * length), st.just(10**6))
    block = oracle.Block(length, rules.cache, draw(st.integers(-1, length - 1)))
    block.frozen = set() if rules.cache == 'off' else set(range(draw(st.integers(0, max(prompt - 1, 0)))))
    words = st.one_of(st.just(set()), st.sets(st.sampled_from([0, 1, 2, 3, 9, 50, checks.MASK_TOKEN]), max_size=5))
    return Life(rules, ids + [checks.MASK_TOKEN] * (length - prompt), set(range(prompt, length)), history,
                appendable=draw(around), output_start=history + draw(st.one_of(st.just(prompt), around)),
                stop_words=draw(words), threshold=draw(st.sampled_from([.25, .5, 1.0, .800000011920929])), block=block,
                committing=[5] * length, alive=draw(st.integers(0, 9)) > 0)


@st.composite
def batches(draw):
    """Sequences under one set of rules, and what the steps draw."""
    length = draw(st.sampled_from([4, 16, 32, 64]))
    rules = Rules(length, draw(st.sampled_from(checks.STRATEGIES)), draw(st.integers(1, max(length // 4, 2))),
                  draw(st.sampled_from(checks.CACHES)), draw(st.booleans()))
    draws = Draws(draw(st.integers(0, 10**6)), draw(st.sampled_from([2, 8, 60, 2000])),
                  draw(st.sampled_from([.05, .3, .7])), draw(st.sampled_from([0, .2, .6])))
    return draw(st.lists(lives(rules), min_size=1, max_size=5)), draws


@given(batches())
@settings(max_examples=80, deadline=None)
def test_twin_is_a_life(case):
    """Red when: the twin differs in any value of any step from one sequence's life by itself, a sequence that waits or
    has ended changes in any bit, or a step reads rows beyond those that were sampled."""
    sequences, draws = case
    batch = Batch(sequences, reference_settle.settle, 'cpu')
    for _ in range(24):
        batch.step(draws)


@given(batches())
@settings(max_examples=40, deadline=None)
def test_early_stop_emits_what_waiting_would(case):
    """Red when: a sequence that stops early emits another text than one that waits for its whole block, or one that
    should end does not."""
    sequences, draws = case
    patient = copy.deepcopy(sequences)
    for life in patient:
        life.stop_words, life.appendable = set(), 10**6
    early = Batch(sequences, reference_settle.settle, 'cpu')
    late = Batch(patient, reference_settle.settle, 'cpu')
    offers = [(life.history, life.appendable, life.output_start, life.stop_words) for life in sequences]
    for _ in range(24):
        early.step(draws)
        late.step(draws)
    pairs = list(zip(sequences, patient, strict=True))
    for _ in range(400):  # the blocks in which a sequence stopped, to their end
        if all(slow.history > life.history for life, slow in pairs if slow.alive and not life.alive):
            break
        late.step(draws)
    for (life, slow), (history, cap, start, words) in zip(pairs, offers, strict=True):
        ends = [p for p, token in enumerate(slow.text) if token in words and history + p >= start][:1]
        ends += [cap - 1] * (cap <= len(slow.text))
        if slow.alive and life.random_offset:
            assert life.alive == (not ends)
            assert life.alive or life.text == slow.text[:max(min(ends) + 1, 0)]


def test_stops_when_certain():
    """Red when: a sequence ends before its outcome is certain, or later, or a stop word before the output counts."""
    checks.check_stops('cpu', settle=reference_settle.settle)


def test_interpreter():
    """Red when: a rule of unmasking, freezing, stopping or beginning a block differs from the twin's, NaN is decided
    before a number, a tie goes to the right, bit 63 is taken for a sign, a sequence without rows changes, or a position
    reads another's sample."""
    run_interpreted(checks)


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter."""
    checks.check_twin(shape, options, 'cuda')


@pytest.mark.gpu
@given(batches())
@settings(max_examples=20, deadline=None)
def test_life(case):
    """Red when: as for the twin, over many steps."""
    sequences, draws = case
    batch = Batch(sequences, settle, 'cuda')
    for _ in range(24):
        batch.step(draws)


@pytest.mark.gpu
def test_stops():
    """Red when: as for the twin."""
    checks.check_stops('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
