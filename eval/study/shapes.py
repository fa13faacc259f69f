"""Checkpoints of published shapes with random weights, and with the demo models' tokenizer; no remote code."""
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .drawing import Draw
from .llada2_shapes import Llada2
from .sdar_shapes import Sdar, SdarMoe

FILE_BYTES = 4 << 30
TOKENIZER = Path(__file__).resolve().parents[1] / 'demo_models' / 'sdar'

_TINY = {'head_dim': 16, 'vocab_size': 32768, 'mask_token_id': 32700}
SHAPES: dict[str, Sdar | Llada2] = {
    'sdar-8b': Sdar(4096, 12288, 36, 32, 8),
    'sdar-1.7b': Sdar(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    'sdar-30b-a3b': SdarMoe(2048, 6144, 48, 32, 4),
    'llada2-mini': Llada2(),
    # for a CPU
    'tiny': Sdar(64, 128, 2, 4, 2, **_TINY),
    'tiny-sdar-moe': SdarMoe(64, 128, 3, 4, 2, **_TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    'tiny-llada2': Llada2(64, 128, 32, 3, 4, 2, **_TINY, num_experts=16, num_experts_per_tok=4, n_group=4,
                          topk_group=2),
}
# What is called stock in the study: model types that LMDeploy 0.18 has no model for run as ours.
_OUR_MODELS = (Llada2.model_type, )


def stock_is(model_type: str | None) -> str:
    """What the engine called stock runs for checkpoints of this type, for the report."""
    if model_type in _OUR_MODELS:
        return (f"this package's own model of {model_type} with focus off, under LMDeploy's own engine and block "
                'diffusion: stock LMDeploy 0.18 has none')
    return 'stock LMDeploy'


def place(name: str, folder: Path, length: int) -> Path:
    """Where a shape's checkpoint is; complete if it has a config.json.

    Raises:
        ValueError: there is no such shape.
    """
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
    shape = SHAPES[name]
    fill(place(name, folder, length), shape.tensors(Draw(device)), shape.config(length))


def fill(target: Path, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]) -> None:
    """Write a folder with these weights, this config.json and the demo models' tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    size = 0
    for tensor_name, tensor in tensors:
        part[tensor_name] = tensor
        size += tensor.nbytes
        if size > FILE_BYTES:
            _flush(part, target, weight_map)
            part, size = {}, 0
    _flush(part, target, weight_map)
    (target / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    # the engine wants one, though requests are token ids
    for file in ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja'):
        shutil.copy(TOKENIZER / file, target)
    # last: its presence says that the checkpoint is complete
    (target / 'config.json').write_text(json.dumps(config, indent=1))


def _flush(part: dict[str, Tensor], target: Path, weight_map: dict[str, str]) -> None:
    if not part:
        return
    name = f'model-{len(set(weight_map.values())):05d}.safetensors'
    save_file(part, target / name, metadata={'format': 'pt'})
    weight_map |= dict.fromkeys(part, name)
