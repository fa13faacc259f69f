"""Checkpoints of published shapes with random weights, and with the demo models' tokenizer; no remote code."""
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

MASK_TOKEN = 151669
FILE_BYTES = 4 << 30
TOKENIZER = Path(__file__).resolve().parents[1] / 'demo_models' / 'sdar'


@dataclass(frozen=True)
class Shape:
    """Sizes of an SDAR model by the names of its config.json."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = False
    mask_token_id: int = MASK_TOKEN


@dataclass(frozen=True)
class MoeShape(Shape):
    """SDAR with experts in every layer."""
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768


SHAPES = {
    'sdar-8b': Shape(4096, 12288, 36, 32, 8),
    'sdar-1.7b': Shape(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    'sdar-30b-a3b': MoeShape(2048, 6144, 48, 32, 4),
    'tiny': Shape(64, 128, 2, 4, 2, head_dim=16, vocab_size=32768, mask_token_id=32700),
}
# published, but not in stock LMDeploy 0.18, so that there is nothing to compare with
WITHOUT_STOCK = ('llada2-mini',)


def place(name: str, folder: Path, length: int) -> Path:
    """Where a shape's checkpoint is; complete if it has a config.json.

    Raises:
        ValueError: there is no such shape, or there is no stock engine for it.
    """
    if name in WITHOUT_STOCK:
        raise ValueError(f'--shape is {name}, which stock LMDeploy 0.18 has no model for; it must be one of '
                         f'{", ".join(SHAPES)}')
    if name not in SHAPES:
        raise ValueError(f'--shape is {name}; it must be one of {", ".join(SHAPES)}')
    return folder / f'{name}-b{length}'


def write(name: str, folder: Path, length: int, device: str) -> None:
    """Write a checkpoint.

    Args:
        name: one of SHAPES.
        folder: where to put a folder of that name.
        length: block length of its config.
        device: where the weights are drawn.
    """
    shape, target = SHAPES[name], place(name, folder, length)
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    for tensor_name, tensor in _tensors(shape, device):
        part[tensor_name] = tensor
        if sum(value.nbytes for value in part.values()) > FILE_BYTES:
            part = _flush(part, target, weight_map)
    _flush(part, target, weight_map)
    (target / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    # the engine wants one, though requests are token ids
    for file in ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja'):
        shutil.copy(TOKENIZER / file, target)
    # last: its presence says that the checkpoint is complete
    (target / 'config.json').write_text(json.dumps(config(shape, length), indent=1))


def config(shape: Shape, length: int) -> dict:
    """The config.json of a shape."""
    moe = isinstance(shape, MoeShape)
    values = {'architectures': ['SDARMoeForCausalLM' if moe else 'SDARForCausalLM'],
              'model_type': 'sdar_moe' if moe else 'sdar', 'attention_bias': False, 'bos_token_id': 1,
              'eos_token_id': 1, 'pad_token_id': 1, 'hidden_act': 'silu', 'max_position_embeddings': 32768,
              'rms_norm_eps': 1e-6, 'rope_theta': 1000000, 'rope_scaling': None, 'sliding_window': None,
              'use_sliding_window': False, 'torch_dtype': 'bfloat16', 'block_size': length, **asdict(shape)}
    if moe:
        values |= {'norm_topk_prob': True, 'decoder_sparse_step': 1, 'mlp_only_layers': []}
    return values


def _flush(part: dict[str, Tensor], target: Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    name = f'model-{len(set(weight_map.values())):05d}.safetensors'
    save_file(part, target / name, metadata={'format': 'pt'})
    weight_map |= dict.fromkeys(part, name)
    return {}


def _tensors(shape: Shape, device: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all weights, on the CPU."""
    generator = torch.Generator(device=device).manual_seed(0)
    hidden, heads, kv_heads, size = (shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads,
                                     shape.head_dim)

    def rand(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, device=device, generator=generator, dtype=torch.bfloat16) * 0.02).cpu()

    def ones(count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    yield 'model.embed_tokens.weight', rand(shape.vocab_size, hidden)
    if not shape.tie_word_embeddings:
        yield 'lm_head.weight', rand(shape.vocab_size, hidden)
    yield 'model.norm.weight', ones(hidden)
    for layer in range(shape.num_hidden_layers):
        prefix = f'model.layers.{layer}.'
        yield prefix + 'input_layernorm.weight', ones(hidden)
        yield prefix + 'post_attention_layernorm.weight', ones(hidden)
        attention = prefix + 'self_attn.'
        yield attention + 'q_proj.weight', rand(heads * size, hidden)
        yield attention + 'k_proj.weight', rand(kv_heads * size, hidden)
        yield attention + 'v_proj.weight', rand(kv_heads * size, hidden)
        yield attention + 'o_proj.weight', rand(hidden, heads * size)
        yield attention + 'q_norm.weight', ones(size)
        yield attention + 'k_norm.weight', ones(size)
        if isinstance(shape, MoeShape):
            yield prefix + 'mlp.gate.weight', rand(shape.num_experts, hidden)
            parts = [(f'mlp.experts.{expert}.', shape.moe_intermediate_size) for expert in range(shape.num_experts)]
        else:
            parts = [('mlp.', shape.intermediate_size)]
        for part, inner in parts:
            yield prefix + part + 'gate_proj.weight', rand(inner, hidden)
            yield prefix + part + 'up_proj.weight', rand(inner, hidden)
            yield prefix + part + 'down_proj.weight', rand(hidden, inner)
