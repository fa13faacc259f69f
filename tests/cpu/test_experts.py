"""The CPU experts against a dense oracle."""
from types import SimpleNamespace

import pytest
import torch

from lmdeploy_focus.cpu.experts import CpuFusedMoEImpl

HIDDEN, FFN, EXPERTS, TOP_K = 8, 6, 5, 2


def gelu_and_mul(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate) * up


@pytest.mark.parametrize('num_rows', [1, 3, 17])
@pytest.mark.parametrize('renormalize', [False, True])
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('act_func', [None, gelu_and_mul])
def test_against_each_row_alone(num_rows, renormalize, bias, act_func):
    """Red when gate and up are swapped, a row gets another row's weight, or renormalising is lost."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, HIDDEN)
    # One expert is chosen by no row.
    weights, ids = torch.rand(num_rows, EXPERTS - 1).topk(TOP_K)
    gate_up, down = torch.randn(EXPERTS, 2 * FFN, HIDDEN), torch.randn(EXPERTS, HIDDEN, FFN)
    gate_up_bias = torch.randn(EXPERTS, 2 * FFN) if bias else None
    down_bias = torch.randn(EXPERTS, HIDDEN) if bias else None
    impl = CpuFusedMoEImpl(SimpleNamespace(renormalize=renormalize, ep_size=1))
    out = impl.forward(x, weights, ids, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias,
                       act_func=act_func)
    for row in range(num_rows):
        expected = torch.zeros(HIDDEN)
        total = weights[row].sum() if renormalize else 1.0
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            inner = gate_up[expert] @ x[row] + (gate_up_bias[expert] if bias else 0)
            act = gelu_and_mul(inner) if act_func else inner[:FFN] * inner[:FFN].sigmoid() * inner[FFN:]
            expected += weight / total * (down[expert] @ act + (down_bias[expert] if bias else 0))
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


def test_experts_on_several_devices_are_refused():
    """Red when expert parallelism is silently ignored."""
    with pytest.raises(ValueError, match=r'ep must be 1 .* got 2'):
        CpuFusedMoEImpl(SimpleNamespace(renormalize=False, ep_size=2))
