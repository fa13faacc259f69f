"""The Triton greedy head beside its twin, and the twin beside the torch path of the model agent."""

import pytest
import torch
from lmdeploy_focus.kernels import reference_greedy_head

from lmdeploy_focus.stages.unmask import confidence

from . import greedy_head_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)


def test_interpreter():
    """Red when: a tie goes to a later token or part, the mask token wins or counts in the sum, parts are joined without
    their maxima, a row beyond the count is read or left unmarked, strides are taken for granted, or the order of the
    sum depends on the number of rows."""
    run_interpreted(checks)


@pytest.mark.parametrize('shape', checks.SMALL, ids=str)
def test_twin_is_the_stages_confidence(shape):
    """Red when: the twin's confidence is of other logits than those that are sampled."""
    logits, mask_token = checks.make(shape, torch.float32, 'cpu')
    tokens, scores = reference_greedy_head.greedy_head(logits, mask_token)
    banned = logits.clone()
    banned[:, mask_token] = float('-inf')
    assert tokens.equal(banned.argmax(1)) and scores.equal(confidence(banned, tokens))


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_twin(shape, dtype):
    """Red when: as in the interpreter, or exponentials are added up in less than float32."""
    checks.check_twin(shape, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_company(shape, dtype):
    """Red when: a row's bits depend on the number of rows."""
    checks.check_company(shape, dtype, 'cuda')


@pytest.mark.gpu
def test_extremes():
    """Red when: NaN, infinities, overflow or a part that is banned as a whole give another answer than the twin's."""
    checks.check_extremes('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
