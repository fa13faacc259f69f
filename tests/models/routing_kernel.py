"""LMDeploy's routing kernel with LLaDA2.0's sizes against the oracle; run by `test_router.py`, device as argument.

The expert biases are shifted as `GroupLimitedRouter` shifts them.
"""
import sys
from pathlib import Path

import torch
from lmdeploy.pytorch.kernels.cuda.moe import route_noaux_tc

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.oracles import llada2_route

SIZES = {'num_experts': 256, 'n_group': 8, 'topk_group': 4, 'num_experts_per_tok': 8, 'routed_scaling_factor': 2.5}
ROWS = 12

device = sys.argv[1]
if device == 'cpu':  # the interpreter has nothing to tune
    route_noaux_tc._fused_noaux_tc_kernel = route_noaux_tc._fused_noaux_tc_kernel.fn
generator = torch.Generator().manual_seed(0)
for mean in (-3.0, -0.6, 0.4):
    logits, bias = torch.randn(ROWS, 256, generator=generator), torch.randn(256, generator=generator) * 0.2 + mean
    shifted = bias - bias.min().clamp_max(0)
    weights, chosen = route_noaux_tc.fused_noaux_tc_routing(logits.to(device), shifted.to(device), 256, 8, 4, 8, True,
                                                            2.5)
    for row in range(ROWS):
        route = llada2_route(logits[row].sigmoid(), bias, SIZES)
        assert set(chosen[row].tolist()) == set(route), (mean, row)
        expected = torch.tensor([route[expert] for expert in chosen[row].tolist()])
        torch.testing.assert_close(weights[row].cpu(), expected, rtol=1e-5, atol=1e-6)
print('routed alike')
