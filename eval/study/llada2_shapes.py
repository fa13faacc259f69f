"""LLaDA2 by its sizes: config.json and tensors in the published layout."""
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .drawing import Draw
from .sdar_shapes import COMMON


@dataclass(frozen=True)
class Llada2:
    """Sizes of a LLaDA2 model by the names of its config.json; the defaults are LLaDA2.0-mini's.

    The published config.json leaves the mask id to the tokenizer, which here is the demo model's and does not know it.
    """
    hidden_size: int = 2048
    intermediate_size: int = 5120
    moe_intermediate_size: int = 512
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 157184
    num_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    mask_token_id: int = 156895

    model_type = 'llada2_moe'

    def config(self, length: int) -> dict[str, Any]:
        """The config.json for blocks of `length`."""
        return {**COMMON, 'architectures': ['LLaDA2MoeModelLM'], 'model_type': self.model_type, 'rope_theta': 600000,
                'partial_rotary_factor': 0.5, 'use_qk_norm': True, 'use_qkv_bias': False, 'use_bias': False,
                'score_function': 'sigmoid', 'moe_router_enable_expert_bias': True, 'router_dtype': 'fp32',
                'norm_topk_prob': True, 'routed_scaling_factor': 2.5, 'tie_word_embeddings': False,
                'block_size': length, **asdict(self)}

    def tensors(self, draw: Draw) -> Iterator[tuple[str, Tensor]]:
        """Names and values of all weights."""
        hidden, size = self.hidden_size, self.head_dim
        queries = self.num_attention_heads * size
        yield 'model.word_embeddings.weight', draw.normal(self.vocab_size, hidden)
        yield 'lm_head.weight', draw.normal(self.vocab_size, hidden)
        yield 'model.norm.weight', draw.ones(hidden)
        for layer in range(self.num_hidden_layers):
            prefix = f'model.layers.{layer}'
            yield f'{prefix}.input_layernorm.weight', draw.ones(hidden)
            yield f'{prefix}.post_attention_layernorm.weight', draw.ones(hidden)
            rows = queries + 2 * self.num_key_value_heads * size
            yield f'{prefix}.attention.query_key_value.weight', draw.normal(rows, hidden)
            yield f'{prefix}.attention.dense.weight', draw.normal(hidden, queries)
            yield f'{prefix}.attention.query_layernorm.weight', draw.ones(size)
            yield f'{prefix}.attention.key_layernorm.weight', draw.ones(size)
            if layer < self.first_k_dense_replace:
                yield from draw.mlp(f'{prefix}.mlp', hidden, self.intermediate_size).items()
            else:
                yield from self._experts(f'{prefix}.mlp', draw)

    def _experts(self, prefix: str, draw: Draw) -> Iterator[tuple[str, Tensor]]:
        hidden, inner = self.hidden_size, self.moe_intermediate_size
        yield f'{prefix}.gate.weight', draw.normal(self.num_experts, hidden)
        yield f'{prefix}.gate.expert_bias', draw.zeros(self.num_experts)
        yield from draw.mlp(f'{prefix}.shared_experts', hidden, inner * self.num_shared_experts).items()
        yield from draw.experts(prefix, self.num_experts, hidden, inner).items()
