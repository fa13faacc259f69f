"""The router of LLaDA2's experts."""
from typing import Any

import torch
from lmdeploy.pytorch.nn.moe.route import NoauxTCRouter, RouterGemm
from torch import Tensor, nn


class GroupLimitedRouter(nn.Module):
    """Chooses experts by sigmoid scores, within the best groups of experts.

    s = sigmoid(x W^T) and s' = s + expert_bias, both in fp32. A group's score is the sum of its two best s'; the best
    `top_k` s' of the best `topk_group` groups are chosen. Weights are the chosen s without bias, divided by their sum,
    times `routed_scaling_factor`.
    """

    def __init__(self, config: Any, device: torch.device | None = None) -> None:
        super().__init__()
        experts = config.num_experts
        # As the checkpoint has them: a product in bf16 would decide near-ties otherwise.
        self.weight = nn.Parameter(torch.empty((experts, config.hidden_size), dtype=torch.float32, device=device),
                                   requires_grad=False)
        self.expert_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32, device=device), requires_grad=False)
        self.gemm = RouterGemm(out_dtype=torch.float32)
        self.choose = NoauxTCRouter('sigmoid', top_k=config.num_experts_per_tok, n_group=config.n_group,
                                    topk_group=config.topk_group, n_routed_experts=experts,
                                    routed_scaling_factor=config.routed_scaling_factor, renormalize=True)
        self.register_buffer('narrow', None, persistent=False)
        # LMDeploy's product of bf16 matrices with an fp32 result, which only some GPUs have
        self._has_mixed_product = getattr(self.gemm.impl, 'allow_cublas_router_gemm', False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [T, E] -> weights [T, k] float32 and numbers [T, k] of the chosen experts."""
        narrow = self.narrow is not None and hidden.dtype == torch.bfloat16
        return self.choose(self.gemm(hidden, self.narrow if narrow else self.weight), self.expert_bias)

    def update_weights(self) -> None:
        """Prepare loaded weights; may be called again."""
        # LMDeploy scores the experts of other groups 0, so that they would pass before a negative s'. One shift of all
        # biases changes no choice.
        self.expert_bias.data -= self.expert_bias.data.min().clamp_max(0)
        narrow = self.weight.data.to(torch.bfloat16)
        lossless = self._has_mixed_product and torch.equal(narrow.float(), self.weight.data)
        self.narrow = narrow if lossless else None
