"""Demo models as Hugging Face checkpoints: bf16 safetensors and a config.json."""
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .network import Decoder, Draft, Shape
from .tokenizer import END_OF_TEXT, IM_END, MASK, STOP_IDS

FOLDER = Path(__file__).resolve().parent


def _config(shape: Shape, **fields) -> dict:
    config = {'vocab_size': shape.vocabulary, 'hidden_size': shape.hidden, 'intermediate_size': shape.intermediate,
              'num_hidden_layers': shape.layers, 'num_attention_heads': shape.heads,
              'num_key_value_heads': shape.kv_heads, 'head_dim': shape.head_size, 'hidden_act': 'silu',
              'max_position_embeddings': 4096, 'initializer_range': 0.02, 'rms_norm_eps': shape.epsilon,
              'use_cache': True, 'tie_word_embeddings': True, 'rope_theta': shape.rope_theta, 'rope_scaling': None,
              'attention_bias': False, 'use_sliding_window': False, 'sliding_window': None,
              'max_window_layers': shape.layers, 'attention_dropout': 0.0, 'bos_token_id': END_OF_TEXT,
              'eos_token_id': IM_END, 'pad_token_id': END_OF_TEXT, 'torch_dtype': 'bfloat16'}
    return config | fields


def _save(folder: str | Path, weights: Mapping[str, torch.Tensor], config: dict) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous().cpu() for name, weight in weights.items()}
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    (folder / 'model.safetensors').chmod(0o644)     # it is written for its owner only
    (folder / 'config.json').write_text(json.dumps(config, indent=1) + '\n')


def _save_decoder(model: Decoder, folder: str | Path, config: dict) -> None:
    _save(folder, {'model.' + name: weight for name, weight in model.state_dict().items()}, config)
    generation = {'bos_token_id': END_OF_TEXT, 'eos_token_id': list(STOP_IDS), 'pad_token_id': END_OF_TEXT,
                  'do_sample': False}
    Path(folder, 'generation_config.json').write_text(json.dumps(generation, indent=1))


def save_ar(model: Decoder, folder: str | Path) -> None:
    """The autoregressive model, as `Qwen3ForCausalLM`."""
    _save_decoder(model, folder, _config(model.shape, architectures=['Qwen3ForCausalLM'], model_type='qwen3',
                                         layer_types=['full_attention'] * model.shape.layers))


def save_sdar(model: Decoder, folder: str | Path, block_length: int = 32) -> None:
    """The block diffusion model, as `SDARForCausalLM`; no remote code: lmdeploy-focus registers the config class."""
    _save_decoder(model, folder, _config(model.shape, architectures=['SDARForCausalLM'], model_type='sdar',
                                         block_size=block_length, mask_token_id=MASK))


def save_draft(model: Draft, folder: str | Path, target_layers: int) -> None:
    """The drafter of a target with that many layers, as `DFlashDraftModel`."""
    draft = {'block_size': model.block_length, 'mask_token_id': MASK, 'target_layer_ids': list(model.target_layers)}
    _save(folder, model.state_dict(),
          _config(model.shape, architectures=['DFlashDraftModel'], model_type='qwen3',
                  layer_types=['full_attention'] * model.shape.layers, num_target_layers=target_layers,
                  block_size=model.block_length, dflash_config=draft))


def _read(folder: str | Path) -> tuple[dict, Shape, dict[str, torch.Tensor]]:
    config = json.loads(Path(folder, 'config.json').read_text())
    shape = Shape(config['vocab_size'], config['hidden_size'], config['num_hidden_layers'],
                  config['num_attention_heads'], config['num_key_value_heads'], config['head_dim'],
                  config['intermediate_size'], config['rope_theta'], config['rms_norm_eps'])
    weights = {name: weight.float() for name, weight in load_file(Path(folder, 'model.safetensors')).items()}
    return config, shape, weights


def load_decoder(folder: str | Path, device: str = 'cpu', dtype: torch.dtype = torch.float32) -> Decoder:
    """`ar` or `sdar`, in evaluation mode and without gradients."""
    _, shape, weights = _read(folder)
    model = Decoder(shape)
    model.load_state_dict({name.removeprefix('model.'): weight for name, weight in weights.items()})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def load_draft(folder: str | Path, device: str = 'cpu', dtype: torch.dtype = torch.float32) -> Draft:
    """`dflash`, in evaluation mode and without gradients."""
    config, shape, weights = _read(folder)
    draft = config['dflash_config']
    model = Draft(shape, draft['target_layer_ids'], draft['block_size'])
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
