"""The Triton ragged attention beside its twin, in the interpreter and compiled; and the twin's causal rows."""
import os
import subprocess
import sys

import pytest
import torch
from lmdeploy_focus.kernels import reference_ragged_attention as reference

from .. import oracle
from . import ragged_attention_checks as checks
from .paged import make_paged

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
CASES = pytest.mark.parametrize('case', checks.SMALL + checks.LARGE, ids=str)


def test_interpreter():
    """Red when: a tile takes rows of the next sequence or mixes heads of a group, a split loses or repeats a block of
    keys, an empty split counts in the sum, a key at or beyond kv_len or right of a causal row is seen, a value of a
    hidden slot is multiplied, strides or the width of the page table are taken for granted, bits of a row depend on
    company or on the bound of the keys, or an argument that the kernel cannot take is not refused."""
    # the variable must be set before triton is imported, and this process builds engines
    done = subprocess.run([sys.executable, checks.__file__], env=os.environ | {'TRITON_INTERPRET': '1'},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('page_size', [16, 64])
def test_causal_rows_of_the_twin(page_size):
    """A row sees what lies left of it and itself, and no more than kv_len.

    Red when: the position is off by one, taken for a row's index, kv_len is ignored, a row that sees nothing is not 0,
    or rows of no sequence take part.
    """
    lengths, seen = [page_size + 1, 3 * page_size, 7], [page_size, 2 * page_size + 3, 7]
    paged = make_paged(lengths, page_size, 2, 32, torch.float32, seed=5)
    query = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(4))
    query[7:] = float('nan')
    positions = torch.tensor([page_size + 5, 0, page_size - 1, 2 * page_size, 2 * page_size + 9, 6, -1, 0, 0])
    sequence = [0, 1, 1, 1, 1, 2, 2]
    result = reference.ragged_attention(query, paged.key_cache, paged.value_cache, paged.page_table,
                                        torch.tensor([0, 1, 5, 7]), torch.tensor(seen), 6, 999, 32**-0.5, causal=True,
                                        position_ids=positions)
    for row, s in enumerate(sequence):
        prefix = min(seen[s], int(positions[row]) + 1)
        expected = torch.zeros(1, 4, 32, dtype=torch.float64)
        if prefix:
            expected = oracle.attention(query[row:row + 1], paged.keys[s][:prefix], paged.values[s][:prefix], 32**-0.5)
        torch.testing.assert_close(result[row:row + 1].double(), expected, rtol=2e-5, atol=2e-5)
    assert not result[7:].any()


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
def test_far_page():
    """Red when: the offset of a page is computed in 32 bits."""
    checks.check_far_page('cuda', torch.bfloat16)


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
