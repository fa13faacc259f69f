"""A drafter as published: config.json and model.safetensors, for readers of either generation."""
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eval.demo_models.network import Draft
from lmdeploy_focus.dflash.admission import check_pair
from lmdeploy_focus.dflash.checkpoint import check_tensors, tensor_shapes
from lmdeploy_focus.dflash.drafter import ARCHITECTURE, FULL, parse_drafter, read_drafter

from .plan import Plan, Shape, rope_theta


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the whole new one, whenever the process ends."""
    unfinished = path.with_name(path.name + '.unfinished')
    unfinished.write_text(text, encoding='utf-8')
    os.replace(unfinished, path)


def draft_config(plan: Plan) -> dict[str, Any]:
    """The drafter's config.json. What has moved from one generation of DFlash checkpoints to the next is in both
    places: the block size, and the base of the rotary embedding."""
    shape = plan.shape
    return {
        'architectures': [ARCHITECTURE], 'model_type': 'qwen3', 'dtype': 'bfloat16',
        'vocab_size': shape.vocabulary, 'hidden_size': shape.hidden, 'intermediate_size': shape.intermediate,
        'num_hidden_layers': shape.layers, 'num_attention_heads': shape.heads, 'num_key_value_heads': shape.kv_heads,
        'head_dim': shape.head_size, 'hidden_act': 'silu', 'rms_norm_eps': shape.epsilon, 'attention_bias': False,
        'attention_dropout': 0.0, 'initializer_range': 0.02, 'max_position_embeddings': plan.max_positions,
        'rope_theta': shape.rope_theta, 'rope_parameters': {'rope_type': 'default', 'rope_theta': shape.rope_theta},
        'tie_word_embeddings': True, 'use_cache': True,
        'layer_types': [FULL] * shape.layers, 'use_sliding_window': False, 'sliding_window': None,
        'max_window_layers': shape.layers, 'num_target_layers': plan.num_target_layers, 'block_size': plan.block_size,
        'dflash_config': {'block_size': plan.block_size, 'mask_token_id': plan.mask_token,
                          'target_layer_ids': list(plan.target_layers)},
    }


def new_draft(plan: Plan, device: str = 'cpu') -> Draft:
    """A drafter with random weights, fp32."""
    with torch.device(device):
        return Draft(plan.shape, plan.target_layers, plan.block_size)


def check_plan(plan: Plan, target: str) -> None:
    """Make sure that the engine will admit what is going to be trained; no memory is taken.

    Raises:
        ValueError: it would not, from `lmdeploy_focus.dflash`.
    """
    drafter = parse_drafter(draft_config(plan), 'the drafter to be trained')
    shape = plan.shape
    check_pair(target, {'num_hidden_layers': plan.num_target_layers, 'hidden_size': shape.hidden,
                        'vocab_size': shape.vocabulary}, drafter)
    found = {name: tuple(tensor.shape) for name, tensor in new_draft(plan, 'meta').state_dict().items()}
    check_tensors(found, tensor_shapes(drafter, shape.hidden, len(plan.target_layers)), drafter.name)


def save_draft(draft: Draft, plan: Plan, folder: Path) -> None:
    """Write both files, bf16; each is the old one or the whole new one at any time."""
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous().cpu()
               for name, weight in draft.state_dict().items()}
    unfinished = folder / 'model.safetensors.unfinished'
    save_file(tensors, unfinished, metadata={'format': 'pt'})
    unfinished.chmod(0o644)     # it is written for its owner only
    os.replace(unfinished, folder / 'model.safetensors')
    write_atomically(folder / 'config.json', json.dumps(draft_config(plan), indent=1) + '\n')


def load_draft(folder: Path, target: str, plan: Plan, device: torch.device | str) -> tuple[Draft, int]:
    """A drafter of the same target, fp32 without gradients, and its mask token.

    Raises:
        ValueError: it is none of this target, or one that this network does not have: with sliding windows, biases or
            a mask embedding of its own.
    """
    from transformers import PretrainedConfig
    drafter = read_drafter(str(folder))
    check_pair(target, {'num_hidden_layers': plan.num_target_layers, 'hidden_size': plan.shape.hidden,
                        'vocab_size': plan.shape.vocabulary}, drafter)
    if drafter.sliding_window or drafter.attention_bias or drafter.causal:
        raise ValueError(f'--compare is {str(folder)!r}, which has sliding windows, biases or causal blocks; it must '
                         'have none')
    config, _ = PretrainedConfig.get_config_dict(str(folder))
    shape = Shape(plan.shape.vocabulary, drafter.hidden_size, len(drafter.layer_types), drafter.num_heads,
                  drafter.num_kv_heads, drafter.head_dim, drafter.intermediate_size,
                  rope_theta(SimpleNamespace(**config)), config.get('rms_norm_eps', 1e-6))
    draft = Draft(shape, drafter.layers_of(plan.num_target_layers), drafter.block_size)
    try:
        weights = load_file(folder / 'model.safetensors')
        draft.load_state_dict({name.removeprefix('model.'): weight.float() for name, weight in weights.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f'--compare is {str(folder)!r}; it must have a model.safetensors with the tensors that its '
                         f'config.json describes: {error}') from error
    return draft.to(device).eval().requires_grad_(False), drafter.mask_token_id
