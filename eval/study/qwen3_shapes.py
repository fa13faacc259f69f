"""Qwen3 by its sizes, and a DFlash drafter for each: config.json, tensors in the published layout, bytes they cost.

Sources: config.json of Qwen/Qwen3-8B and Qwen/Qwen3-1.7B; for the drafter that of z-lab/Qwen3-8B-DFlash-b16 (arXiv
2602.06036), whose sizes a layer are the target's.
"""
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from .drawing import Draw
from .sdar_shapes import COMMON
from .shapes import fill

BF16 = 2
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Qwen3:
    """Sizes of a Qwen3 model by the names of its config.json, and those of its drafter that are not the same.

    draft_layers: layers of the drafter, which sees as many layers of the target
    block_size: of the drafter, the known token included
    mask_token_id: of the drafter; prompts stay below it
    """
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = False
    draft_layers: int = 5
    block_size: int = 16
    mask_token_id: int = 151669

    def config(self) -> dict[str, Any]:
        """The target's config.json."""
        sizes = asdict(self)
        for field in ('draft_layers', 'block_size', 'mask_token_id'):
            del sizes[field]
        return {**COMMON, **sizes, 'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'rope_theta': 1000000,
                'attention_bias': False, 'max_window_layers': self.num_hidden_layers}

    def draft_config(self) -> dict[str, Any]:
        """The drafter's config.json."""
        from lmdeploy.pytorch.spec_decode.dflash_utils import build_target_layer_ids
        chosen = build_target_layer_ids(self.num_hidden_layers, self.draft_layers)
        return {**self.config(), 'architectures': ['DFlashDraftModel'], 'num_hidden_layers': self.draft_layers,
                'max_window_layers': self.draft_layers, 'layer_types': ['full_attention'] * self.draft_layers,
                'num_target_layers': self.num_hidden_layers, 'block_size': self.block_size,
                'dflash_config': {'mask_token_id': self.mask_token_id, 'target_layer_ids': list(chosen)}}

    def sizes(self) -> dict[str, Shape]:
        """Shapes of the target's tensors by name."""
        hidden, inner, size = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * size, self.num_key_value_heads * size
        of_layer: dict[str, Shape] = {
            'input_layernorm': (hidden, ), 'post_attention_layernorm': (hidden, ), 'self_attn.q_norm': (size, ),
            'self_attn.k_norm': (size, ), 'self_attn.q_proj': (queries, hidden), 'self_attn.k_proj': (keys, hidden),
            'self_attn.v_proj': (keys, hidden), 'self_attn.o_proj': (hidden, queries), 'mlp.gate_proj': (inner, hidden),
            'mlp.up_proj': (inner, hidden), 'mlp.down_proj': (hidden, inner)}
        sizes: dict[str, Shape] = {'model.embed_tokens.weight': (self.vocab_size, hidden)}
        if not self.tie_word_embeddings:
            sizes['lm_head.weight'] = (self.vocab_size, hidden)
        sizes['model.norm.weight'] = (hidden, )
        for layer in range(self.num_hidden_layers):
            sizes |= {f'model.layers.{layer}.{name}.weight': shape for name, shape in of_layer.items()}
        return sizes

    def draft_sizes(self) -> dict[str, Shape]:
        """Shapes of the drafter's tensors by name."""
        from lmdeploy_focus.dflash.checkpoint import tensor_shapes
        from lmdeploy_focus.dflash.drafter import parse_drafter
        drafter = parse_drafter(self.draft_config(), 'the drafter of the study')
        return tensor_shapes(drafter, self.hidden_size, self.draft_layers)

    def target_bytes(self, context: float = 0) -> float:
        """Bytes that a forward of the target reads: bf16 weights, its head once, and the keys and values of `context`
        tokens; of the embedding it reads single rows."""
        head = self.vocab_size * self.hidden_size
        layers = sum(prod(shape) for name, shape in self.sizes().items() if name.startswith('model.layers.'))
        return BF16 * (layers + self.hidden_size + head) + context * self._kv_bytes(self.num_hidden_layers)

    def draft_bytes(self, context: float = 0) -> float:
        """The same of the drafter, which uses the target's head."""
        weights = sum(prod(shape) for shape in self.draft_sizes().values()) + self.vocab_size * self.hidden_size
        return BF16 * weights + context * self._kv_bytes(self.draft_layers)

    def _kv_bytes(self, layers: int) -> int:
        return 2 * BF16 * layers * self.num_key_value_heads * self.head_dim


SHAPES = {
    'qwen3-8b': Qwen3(4096, 12288, 36, 32, 8),
    'qwen3-1.7b': Qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    # for a CPU
    'tiny-qwen3': Qwen3(64, 128, 5, 4, 2, head_dim=16, vocab_size=4096, draft_layers=2, block_size=8,
                        mask_token_id=4000),
}


def places(name: str, folder: Path) -> tuple[Path, Path]:
    """Where a shape's target and its drafter are; each is complete if it has a config.json.

    Raises:
        ValueError: there is no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f'--shape is {name}; it must be one of {", ".join(SHAPES)}')
    return folder / name, folder / f'{name}-dflash'


def write(name: str, folder: Path, device: str) -> None:
    """Write target and drafter with random weights, drawn on `device`."""
    shape, (target, draft) = SHAPES[name], places(name, folder)
    draw = Draw(device)
    fill(target, _drawn(shape.sizes(), draw), shape.config())
    fill(draft, _drawn(shape.draft_sizes(), draw), shape.draft_config())


def _drawn(sizes: Mapping[str, Shape], draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for name, shape in sizes.items():
        yield name, draw.ones(shape[0]) if len(shape) == 1 else draw.normal(*shape)
