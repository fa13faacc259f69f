"""SDAR and SDAR-MoE by their sizes: config.json and tensors in the published layout."""
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .drawing import Draw

# One token begins, ends and pads: no request of the study ends by itself.
COMMON = {'bos_token_id': 1, 'eos_token_id': 1, 'pad_token_id': 1, 'hidden_act': 'silu',
          'max_position_embeddings': 32768, 'rms_norm_eps': 1e-6, 'rope_scaling': None, 'sliding_window': None,
          'use_sliding_window': False, 'torch_dtype': 'bfloat16'}


@dataclass(frozen=True)
class Sdar:
    """Sizes of an SDAR model by the names of its config.json."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = False
    mask_token_id: int = 151669

    model_type = 'sdar'

    def config(self, length: int) -> dict[str, Any]:
        """The config.json for blocks of `length`."""
        return {**COMMON, 'architectures': ['SDARForCausalLM'], 'model_type': self.model_type, 'attention_bias': False,
                'rope_theta': 1000000, 'block_size': length, **asdict(self)}

    def tensors(self, draw: Draw) -> Iterator[tuple[str, Tensor]]:
        """Names and values of all weights."""
        hidden, size = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * size, self.num_key_value_heads * size
        yield 'model.embed_tokens.weight', draw.normal(self.vocab_size, hidden)
        if not self.tie_word_embeddings:
            yield 'lm_head.weight', draw.normal(self.vocab_size, hidden)
        yield 'model.norm.weight', draw.ones(hidden)
        for layer in range(self.num_hidden_layers):
            prefix = f'model.layers.{layer}'
            yield f'{prefix}.input_layernorm.weight', draw.ones(hidden)
            yield f'{prefix}.post_attention_layernorm.weight', draw.ones(hidden)
            yield f'{prefix}.self_attn.q_proj.weight', draw.normal(queries, hidden)
            yield f'{prefix}.self_attn.k_proj.weight', draw.normal(keys, hidden)
            yield f'{prefix}.self_attn.v_proj.weight', draw.normal(keys, hidden)
            yield f'{prefix}.self_attn.o_proj.weight', draw.normal(hidden, queries)
            yield f'{prefix}.self_attn.q_norm.weight', draw.ones(size)
            yield f'{prefix}.self_attn.k_norm.weight', draw.ones(size)
            yield from self._mlp(f'{prefix}.mlp', draw)

    def _mlp(self, prefix: str, draw: Draw) -> Iterator[tuple[str, Tensor]]:
        yield from draw.mlp(prefix, self.hidden_size, self.intermediate_size).items()


@dataclass(frozen=True)
class SdarMoe(Sdar):
    """SDAR with experts in every layer."""
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    model_type = 'sdar_moe'

    def config(self, length: int) -> dict[str, Any]:
        """The config.json for blocks of `length`."""
        return {**super().config(length), 'architectures': ['SDARMoeForCausalLM'], 'norm_topk_prob': True,
                'decoder_sparse_step': 1, 'mlp_only_layers': []}

    def _mlp(self, prefix: str, draw: Draw) -> Iterator[tuple[str, Tensor]]:
        yield f'{prefix}.gate.weight', draw.normal(self.num_experts, self.hidden_size)
        yield from draw.experts(prefix, self.num_experts, self.hidden_size, self.moe_intermediate_size).items()
