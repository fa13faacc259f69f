"""The Triton importance beside its twin: in the interpreter, and compiled."""

import pytest
import torch

from . import importance_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)


def test_interpreter():
    """Red when: a neighbour of the pool is the wrong one or comes from beyond the list, padding takes part in a softmax
    or a sum, a head of the last, partly filled tile is counted or lost, strides are taken for granted, the order of a
    sum depends on the batch, or a shape that the kernel cannot take is not refused."""
    run_interpreted(checks)


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_twin(shape, dtype):
    """Red when: as above, or scores are accumulated in less than float32."""
    checks.check_twin(shape, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_company(shape, dtype):
    """Red when: bits depend on the batch, or one sequence's NaN reaches another."""
    checks.check_company(shape, dtype, 'cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
