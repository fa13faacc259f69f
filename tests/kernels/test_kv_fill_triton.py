"""The Triton KV write beside its twin, in the interpreter and compiled; and rows that the twin leaves out."""

import pytest
import torch
from lmdeploy_focus.kernels import reference_kv_fill as reference

from . import kv_fill_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)


def test_interpreter():
    """Red when: page and offset are swapped, keys and values change places, a head or the last, partly filled block of
    values is lost, a stride is taken for granted, a row with page -1 is written, or an argument that the kernel cannot
    take is not refused."""
    run_interpreted(checks)


def test_rows_of_the_twin_without_a_page():
    """Red when: -1 is taken for the last page."""
    key, value = torch.arange(24.).view(2, 3, 1, 4)
    key_cache, value_cache = torch.full((2, 2, 16, 1, 4), float('nan'))
    reference.kv_fill(key, value, key_cache, value_cache, torch.tensor([-1, 1, -1]), torch.tensor([0, 5, 0]))
    assert key_cache[1, 5].equal(key[1]) and value_cache[1, 5].equal(value[1])
    assert (~key_cache.isnan()).sum() == (~value_cache.isnan()).sum() == 4


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
def test_twin(shape, dtype):
    """Red when: as in the interpreter, or a row is rounded other than torch rounds."""
    checks.check_twin(shape, dtype, dtype, 'cuda')
    checks.check_twin(shape, torch.float32, dtype, 'cuda')


@pytest.mark.gpu
def test_far_page():
    """Red when: the offset of a page is computed in 32 bits."""
    checks.check_far_page('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
