"""Mixture of experts on a CPU: one expert after another, each on the rows that chose it."""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec, FusedMoEImpl


class CpuFusedMoEImpl(FusedMoEImpl):
    """The experts of one layer.

    Raises:
        ValueError: The experts are spread over several devices.
    """

    def __init__(self, spec: FusedMoEBuildSpec) -> None:
        if spec.ep_size > 1:
            raise ValueError(f"ep must be 1 with device_type='cpu', but got {spec.ep_size}")
        self.renormalize = spec.renormalize

    def forward(self,
                hidden_states: torch.Tensor,
                topk_weights: torch.Tensor,
                topk_ids: torch.Tensor,
                gate_up_weights: torch.Tensor,
                down_weights: torch.Tensor,
                gate_up_bias: torch.Tensor | None = None,
                down_bias: torch.Tensor | None = None,
                expert_list: list[int] | None = None,
                act_func: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Weighted sum of the chosen experts.

        Args:
            hidden_states: [T, hidden].
            topk_weights, topk_ids: Weight and number of the chosen experts, [T, k].
            gate_up_weights: [experts, 2 * ffn, hidden]; the gate's rows are the first half.
            down_weights: [experts, hidden, ffn].
            gate_up_bias, down_bias: [experts, 2 * ffn] and [experts, hidden], or None.
            expert_list: Part of the interface; all experts are here.
            act_func: Activation of gate and up together, [n, 2 * ffn] to [n, ffn]; None is silu(gate) * up.

        Returns:
            [T, hidden] in the dtype of `hidden_states`; the sum is fp32, in the order of the experts.
        """
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            rows, choice = (topk_ids == expert).nonzero(as_tuple=True)
            gate_up = F.linear(hidden_states[rows], gate_up_weights[expert],
                               None if gate_up_bias is None else gate_up_bias[expert])
            if act_func is not None:
                inner = act_func(gate_up)
            else:
                gate, up = gate_up.chunk(2, dim=-1)
                inner = F.silu(gate) * up
            result = F.linear(inner, down_weights[expert], None if down_bias is None else down_bias[expert])
            out.index_add_(0, rows, result.float() * topk_weights[rows, choice, None].float())
        return out.to(hidden_states.dtype)
