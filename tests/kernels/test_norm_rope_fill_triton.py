"""The Triton norm, RoPE and KV write beside its twin, in the interpreter and compiled; and the twin beside LMDeploy."""

import pytest
import torch
from lmdeploy_focus.kernels import reference_norm_rope_fill as reference
from lmdeploy_focus.kernels.norm_rope_fill import norm_rope_fill

from . import norm_rope_fill_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)


def test_interpreter():
    """Red when: the variance covers the rotated part alone or padding too, queries are normed with the weight of keys,
    the sign or the half of a rotation is wrong, the part that is not rotated is, a block of heads is lost where its
    number is no power of two, a rounding is left out, a row with page -1 is written, or an argument that the kernel
    cannot take is not refused."""
    run_interpreted(checks)


@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL, ids=str)
def test_twin_is_stock(shape, dtype):
    """Bit for bit what LMDeploy's own norm and RoPE compute, one after the other.

    Red when: an intermediate result is rounded that LMDeploy keeps, or the other way round.
    """
    from lmdeploy.pytorch.backends.default.apply_rotary_emb import DefaultApplyRotaryEmbImpl
    from lmdeploy.pytorch.backends.default.norm import DefaultRMSNormImpl
    _, heads, kv_heads, size, rotary, _ = shape
    arguments = checks.make(shape, dtype, 'cpu')
    query, key, value = arguments['qkv'].unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    norm = DefaultRMSNormImpl(size, arguments['eps'])
    query, key = norm.forward(query, arguments['query_weight']), norm.forward(key, arguments['key_weight'])
    DefaultApplyRotaryEmbImpl().forward(query[..., :rotary], key[..., :rotary], arguments['cos'], arguments['sin'])
    result = reference.norm_rope_fill(**arguments, return_key=True)
    assert result[0].equal(query) and result[1].equal(key)
    cached = arguments['pages'] >= 0
    at = arguments['pages'][cached], arguments['offsets'][cached]
    assert arguments['key_cache'][at].equal(key[cached]) and arguments['value_cache'][at].equal(value[cached])
    assert (~arguments['key_cache']._base.isnan()).sum() == key[cached].numel()


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
def test_twin(shape, dtype):
    """Red when: as in the interpreter, or a product and a sum are contracted."""
    checks.check_twin(shape, dtype, 'cuda')
    checks.check_twin(shape, dtype, 'cuda', torch.float32)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
def test_kernel_is_stock(shape, dtype):
    """What LMDeploy's own kernels compute, one after the other, up to the order of the norm's sum.

    Red when: a rounding differs from that of the kernels that the model runs without us.
    """
    kernels = pytest.importorskip('lmdeploy.pytorch.kernels.cuda')
    _, heads, kv_heads, size, _, _ = shape
    arguments = checks.make(shape, dtype, 'cuda')
    query, key, _ = arguments['qkv'].unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    query = kernels.rms_norm(query, arguments['query_weight'], arguments['eps'])
    key = kernels.rms_norm(key, arguments['key_weight'], arguments['eps'])
    kernels.apply_rotary_pos_emb(query, key, arguments['cos'], arguments['sin'], query, key)
    result = norm_rope_fill(**arguments, return_key=True)
    checks.close(result[0], query)
    checks.close(result[1], key)


@pytest.mark.gpu
def test_refusals():
    """Red when: the wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
