"""LLaDA2, out of LMDeploy's layers: SDAR-MoE's with other names, partial RoPE, another router and a shared expert."""
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lmdeploy.pytorch.model_inputs import StepContextManager
from lmdeploy.pytorch.models.sdar_moe import (
    SDARMoeAttention,
    SDARMoeDecoderLayer,
    SDARMoeForCausalLM,
    SDARMoeMLP,
    SDARMoeModel,
)
from lmdeploy.pytorch.nn import ApplyRotaryEmb, RMSNorm, build_rotary_embedding_from_config
from lmdeploy.pytorch.nn.linear import build_rowwise_linear
from lmdeploy.pytorch.nn.moe import build_fused_moe
from torch import Tensor, nn

from .checked_weights import CheckedWeights
from .decoder import SplitModel
from .llada2_config import check_built
from .router import GroupLimitedRouter
from .tensors import FP8_BLOCK, SCALE

# Published name -> that of LMDeploy's module, in this order.
_NAMES = (('.word_embeddings.', '.embed_tokens.'), ('.attention.query_key_value.', '.self_attn.qkv_proj.'),
          ('.attention.query_layernorm.', '.self_attn.q_norm.'), ('.attention.key_layernorm.', '.self_attn.k_norm.'),
          ('.attention.dense.', '.self_attn.o_proj.'))


class PartialRotaryEmb(nn.Module):
    """Rotates the first dimensions of each head, as many as the tables have, in place; the rest passes."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = ApplyRotaryEmb()

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query [T, H, D], key [T, Hkv, D], tables [T, rotary size]."""
        size = cos.size(-1)
        self.rotate(query[..., :size], key[..., :size], cos, sin, inplace=True)
        return query, key


class LLaDA2Attention(SDARMoeAttention):
    """Attention with q/k-norm and partial RoPE."""

    def __init__(self, config: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self.apply_rotary_pos_emb = PartialRotaryEmb()


class LLaDA2Experts(nn.Module):
    """Routed experts, and a shared one that every token takes."""

    def __init__(self, config: Any, layer_idx: int, dtype: torch.dtype | None = None,
                 device: torch.device | None = None) -> None:
        super().__init__()
        self.gate = GroupLimitedRouter(config, device=device)
        self.experts = build_fused_moe(config.hidden_size, config.moe_intermediate_size, config.num_experts,
                                       top_k=config.num_experts_per_tok, renormalize=False, dtype=dtype, device=device,
                                       quant_config=getattr(config, 'quantization_config', None), all_reduce=True,
                                       layer_idx=layer_idx)
        self.shared_experts = None
        if config.num_shared_experts:
            inner = config.moe_intermediate_size * config.num_shared_experts
            self.shared_experts = SDARMoeMLP(config, inner, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, T, E] -> [1, T, E]."""
        rows = hidden.flatten(0, -2)
        out = self.experts(rows, *self.gate(rows))
        if self.shared_experts is not None:
            out = out + self.shared_experts(rows)
        return out.view_as(hidden)


class LLaDA2DecoderLayer(SDARMoeDecoderLayer):
    """Attention, then an MLP in the first layers and experts in the others."""

    def __init__(self, config: Any, layer_idx: int, dtype: torch.dtype | None = None,
                 device: torch.device | None = None) -> None:
        nn.Module.__init__(self)  # the base class's own would build Qwen3-MoE's parts
        self.layer_idx = layer_idx
        self.self_attn = LLaDA2Attention(config, dtype=dtype, device=device)
        if layer_idx < config.first_k_dense_replace:
            self.mlp: nn.Module = SDARMoeMLP(config, config.intermediate_size, dtype=dtype, device=device)
        else:
            self.mlp = LLaDA2Experts(config, layer_idx, dtype=dtype, device=device)
        quant_config = getattr(config, 'quantization_config', None)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, quant_config=quant_config, dtype=dtype,
                                       device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, quant_config=quant_config,
                                                dtype=dtype, device=device)


class LLaDA2Model(SDARMoeModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        nn.Module.__init__(self)  # as above
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx, dtype=dtype,
                                         device=device)
        self.layers = nn.ModuleList([LLaDA2DecoderLayer(config, index, dtype=dtype, device=device)
                                     for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = build_rotary_embedding_from_config(config)


class _LLaDA2ForMaskedLM(SDARMoeForCausalLM):

    def __init__(self, config: Any, ctx_mgr: StepContextManager, dtype: torch.dtype | None = None,
                 device: torch.device | None = None) -> None:
        nn.Module.__init__(self)  # as above
        check_built(config)
        self.config, self.ctx_mgr = config, ctx_mgr
        config.dllm_block_length = ctx_mgr.build_ctx.dllm_config.block_length
        self.model = LLaDA2Model(config, dtype=dtype, device=device)
        self.lm_head = build_rowwise_linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype,
                                            device=device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors under their published names."""
        super().load_weights(self._renamed(weights))

    def _renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            for published, ours in _NAMES:
                name = name.replace(published, ours)
            module, _, kind = name.rpartition('.')
            if not module.endswith('.qkv_proj'):
                yield name, weight
                continue
            # Not LMDeploy's `weight_spliter`: in FP8 models it takes every weight that is not FP8 yet for scales.
            unit = FP8_BLOCK if kind == SCALE else 1
            counts = [rows // unit for rows in self.get_submodule(module).qkv_split_section]
            for part, rows in zip('qkv', weight.split(counts), strict=True):
                yield f'{module.removesuffix("qkv_proj")}{part}_proj.{kind}', rows


class LLaDA2MoeModelLM(CheckedWeights, _LLaDA2ForMaskedLM):
    """LLaDA2.0 and 2.1 under LMDeploy's own block diffusion.

    Raises:
        ValueError: the config asks for what the model does not have, or the checkpoint's tensors are not the model's.
    """


class FocusLLaDA2MoeModelLM(SplitModel, LLaDA2MoeModelLM):
    """The same with a `decoder` for the decode step."""
