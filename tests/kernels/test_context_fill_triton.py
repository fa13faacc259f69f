"""The Triton write of a drafter's context beside its twin, in the interpreter and compiled; the twin beside the one of
a layer."""

import pytest
import torch
from lmdeploy_focus.kernels import reference_context_fill, reference_norm_rope_fill

from . import context_fill_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)


def test_interpreter():
    """Red when: a layer takes the keys, weights, or cache of another, keys and values change places, the part that is
    not rotated is, a row with page -1 is written, or an argument that the kernel cannot take is not refused."""
    run_interpreted(checks)


@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL, ids=str)
def test_twin_is_each_layers_own(shape, dtype):
    """Red when: a layer of many has other bits than a layer with queries writes, or is written to another's cache."""
    arguments = checks.make(shape, dtype, 'cpu')
    reference_context_fill.context_fill(**arguments)
    _, layers, kv_heads, size, _, _ = shape
    projected = arguments['projected'].unflatten(1, (layers, -1))
    for layer in range(layers):
        own = {name: torch.full_like(arguments[name][layer], float('nan')) for name in ('key_cache', 'value_cache')}
        query = torch.zeros(len(projected), 2 * size, dtype=dtype)
        rest = {name: arguments[name] for name in ('cos', 'sin', 'pages', 'offsets', 'eps')}
        weight = arguments['key_weight'][layer]
        reference_norm_rope_fill.norm_rope_fill(torch.cat([query, projected[:, layer]], 1), weight, weight, **own,
                                                **rest)
        for name, cache in own.items():
            torch.testing.assert_close(arguments[name][layer], cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
def test_twin(shape, dtype):
    """Red when: as in the interpreter, or a product and a sum are contracted."""
    checks.check_twin(shape, dtype, 'cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
