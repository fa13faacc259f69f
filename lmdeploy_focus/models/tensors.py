"""The tensors of a published checkpoint, by its config: names and shapes."""
from collections.abc import Callable, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
FP8_BLOCK = 128  # rows and columns of a weight that share a scale, in LMDeploy's kernels
SCALE = 'weight_scale_inv'
# Matrices that LMDeploy never has in FP8.
_NEVER_FP8 = ('embed_tokens.weight', 'word_embeddings.weight', 'lm_head.weight', '.mlp.gate.weight')


def tensor_shapes(config: Any) -> Shapes | None:
    """Names and shapes of all tensors of a checkpoint with this HF config; scales of FP8 weights apart.

    Args:
        config: of model type 'sdar', 'sdar_moe' or 'llada2_moe'.

    Returns:
        None for a quantised checkpoint whose tensors have other names or shapes than those of a plain one.
    """
    quantisation = getattr(config, 'quantization_config', None)
    if quantisation is not None and not quantisation.get('lmdeploy_patched') and not _blocked_fp8(quantisation):
        return None
    return _BY_MODEL_TYPE[config.model_type](config)


def scale_shapes(config: Any) -> Shapes:
    """Names and shapes of the scales that FP8 weights of a checkpoint with this HF config must have: 128x128 rows and
    columns share one. Empty unless LMDeploy reads it as block-scaled FP8."""
    quantisation = getattr(config, 'quantization_config', None)
    if quantisation is None or quantisation.get('lmdeploy_patched') or not _blocked_fp8(quantisation):
        return {}
    return {f'{name.removesuffix("weight")}{SCALE}': (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
            for name, shape in _BY_MODEL_TYPE[config.model_type](config).items()
            if len(shape) == 2 and not name.endswith(_NEVER_FP8)}


def _blocked_fp8(quantisation: Mapping[str, Any]) -> bool:
    return quantisation.get('quant_method') == 'fp8' and quantisation.get('weight_block_size') is not None


def _head_dim(config: Any) -> int:
    return getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads


def _heads(config: Any) -> tuple[int, int]:
    """Query and key heads; LMDeploy counts the copies of key heads that more ranks than heads need."""
    return config.num_attention_heads, config.num_key_value_heads // getattr(config, 'num_replicate_key_value_heads', 1)


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {f'{prefix}.gate_proj.weight': (inner, hidden), f'{prefix}.up_proj.weight': (inner, hidden),
            f'{prefix}.down_proj.weight': (hidden, inner)}


def _experts(prefix: str, config: Any) -> Shapes:
    shapes: Shapes = {}
    for expert in range(config.num_experts):
        shapes |= _mlp(f'{prefix}.experts.{expert}', config.hidden_size, config.moe_intermediate_size)
    return shapes


def _around(config: Any, embedding: str, layer: Callable[[str, int], Shapes]) -> Shapes:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: Shapes = {f'model.{embedding}.weight': (vocabulary, hidden), 'model.norm.weight': (hidden, )}
    if not config.tie_word_embeddings:
        shapes['lm_head.weight'] = (vocabulary, hidden)
    for index in range(config.num_hidden_layers):
        prefix = f'model.layers.{index}'
        shapes |= {f'{prefix}.input_layernorm.weight': (hidden, ),
                   f'{prefix}.post_attention_layernorm.weight': (hidden, )}
        shapes |= layer(prefix, index)
    return shapes


def _sdar_attention(prefix: str, config: Any) -> Shapes:
    hidden, size, (heads, kv_heads) = config.hidden_size, _head_dim(config), _heads(config)
    rows = {'q_proj': heads * size, 'k_proj': kv_heads * size, 'v_proj': kv_heads * size, 'o_proj': hidden}
    shapes: Shapes = {f'{prefix}.self_attn.{name}.weight': (count, hidden) for name, count in rows.items()}
    shapes[f'{prefix}.self_attn.o_proj.weight'] = (hidden, heads * size)
    if config.attention_bias:
        shapes |= {f'{prefix}.self_attn.{name}.bias': (count, ) for name, count in rows.items()}
    return shapes | {f'{prefix}.self_attn.{name}.weight': (size, ) for name in ('q_norm', 'k_norm')}


def _sdar(config: Any) -> Shapes:

    def layer(prefix: str, index: int) -> Shapes:
        return _sdar_attention(prefix, config) | _mlp(f'{prefix}.mlp', config.hidden_size, config.intermediate_size)

    return _around(config, 'embed_tokens', layer)


def _sdar_moe(config: Any) -> Shapes:

    def layer(prefix: str, index: int) -> Shapes:
        shapes, hidden = _sdar_attention(prefix, config), config.hidden_size
        if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
            return shapes | _mlp(f'{prefix}.mlp', hidden, config.intermediate_size)
        return shapes | {f'{prefix}.mlp.gate.weight': (config.num_experts, hidden)} | _experts(f'{prefix}.mlp', config)

    return _around(config, 'embed_tokens', layer)


def _llada2(config: Any) -> Shapes:
    hidden, size, (heads, kv_heads) = config.hidden_size, _head_dim(config), _heads(config)

    def layer(prefix: str, index: int) -> Shapes:
        shapes: Shapes = {f'{prefix}.attention.query_key_value.weight': ((heads + 2 * kv_heads) * size, hidden),
                          f'{prefix}.attention.query_layernorm.weight': (size, ),
                          f'{prefix}.attention.key_layernorm.weight': (size, ),
                          f'{prefix}.attention.dense.weight': (hidden, heads * size)}
        if index < config.first_k_dense_replace:
            return shapes | _mlp(f'{prefix}.mlp', hidden, config.intermediate_size)
        shapes |= {f'{prefix}.mlp.gate.weight': (config.num_experts, hidden),
                   f'{prefix}.mlp.gate.expert_bias': (config.num_experts, )}
        shapes |= _experts(f'{prefix}.mlp', config)
        if config.num_shared_experts:
            inner = config.moe_intermediate_size * config.num_shared_experts
            shapes |= _mlp(f'{prefix}.mlp.shared_experts', hidden, inner)
        return shapes

    return _around(config, 'word_embeddings', layer)


_BY_MODEL_TYPE = {'sdar': _sdar, 'sdar_moe': _sdar_moe, 'llada2_moe': _llada2}
