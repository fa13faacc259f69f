"""The Triton compaction beside its twin, in the interpreter and compiled; and the twin beside indexing."""

import pytest
import torch
from lmdeploy_focus.kernels import reference_compact as reference

from . import compact_checks as checks
from .interpreter import run_interpreted


def test_interpreter():
    """Red when: a row or the end of one is lost, a tensor takes another's rows, strides are taken for granted, a row
    beyond the real ones is read or not 0, or an argument that the kernel cannot take is not refused."""
    run_interpreted(checks)


def test_twin_is_indexing():
    """Red when: the twin takes other rows than `source` names, or reads a row beyond the real ones."""
    source, tensors = checks.make(9, 5, torch.float32, 'cpu')
    source[3:] = 99
    for tensor, result in zip(tensors, reference.compact(source, torch.tensor([3]), *tensors), strict=True):
        assert result[:3].equal(torch.stack([tensor[row] for row in source[:3].tolist()]))
        assert result.shape == (5, *tensor.shape[1:]) and not result[3:].any()
    whole, = reference.compact(source[:3], None, tensors[0])
    assert whole.equal(tensors[0][source[:3]])


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('rows,taken,real', checks.SMALL + checks.LARGE)
def test_twin(rows, taken, real, dtype):
    """Red when: as in the interpreter, compiled."""
    checks.check_twin(rows, taken, real, dtype, 'cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
