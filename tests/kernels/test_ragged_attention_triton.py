"""The Triton ragged attention beside its twin, in the interpreter and compiled."""

import pytest
import torch

from . import ragged_attention_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
CASES = pytest.mark.parametrize('case', checks.SMALL + checks.LARGE, ids=str)


def test_interpreter():
    """Red when: a tile takes rows of the next sequence or mixes heads of a group, a program leaves out or repeats an
    item, a split loses or repeats a block of keys, an empty split counts in the sum, a key at or beyond a row's own end
    is seen or one before its window, a value of a slot that no row sees is multiplied, memory that nothing has written
    is read, strides or the width of the page table are taken for granted, bits of a row depend on company or on the
    bound of the keys, the list of tiles is not the twin's, the programs decide on another number of splits than the
    tiles call for, or an argument that the kernels cannot take is not refused."""
    run_interpreted(checks)


@pytest.mark.gpu
@DTYPES
@CASES
def test_twin(case, dtype):
    """Red when: as in the interpreter, or scores or sums are kept in less than float32."""
    checks.check_twin(case, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@CASES
def test_company(case, dtype):
    """Red when: the bits of a row depend on the batch although the number of splits is fixed."""
    checks.check_company(case, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@CASES
def test_window(case, dtype):
    """Red when: a row sees a key before its window, a block of keys that some row sees is passed over, or a window of
    everything is another attention."""
    checks.check_window(case, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
def test_decision(dtype):
    """Red when: the programs decide on another number of splits than the tiles on the device call for."""
    checks.check_decision('cuda', dtype)


@pytest.mark.gpu
def test_work():
    """Red when: the list of tiles is not the twin's."""
    checks.check_work('cuda')


@pytest.mark.gpu
@DTYPES
def test_graph(dtype):
    """Red when: a launch depends on anything that the host knows of the rows."""
    checks.check_graph(dtype)


@pytest.mark.gpu
def test_far_page():
    """Red when: the offset of a page is computed in 32 bits."""
    checks.check_far_page('cuda', torch.bfloat16)


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrappers let through what their kernels cannot take."""
    checks.check_refusals('cuda')
