"""What LMDeploy has to know of an SDAR checkpoint before it builds the model: config, block length, mask id.

Everything is read from the checkpoint's own files as data; `--trust-remote-code` is never needed.
"""
import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.configurations import AutoModelConfigBuilder
from lmdeploy.pytorch.configurations.sdar import SDARModelConfigBuilder
from lmdeploy.pytorch.models.module_map import CUSTOM_MODULE_MAP
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from ..config import BLOCK_LENGTHS

SDAR_MASK_TOKEN = '<|MASK|>'
SDAR_MASK_TOKEN_ID = 151669

# LMDeploy's architecture -> ours, under a name of its own, so that registering it changes nothing for stock configs.
FOCUS_ARCHITECTURES = {'SDARForCausalLM': 'FocusSDARForCausalLM'}
FOCUS_CLASSES = {'FocusSDARForCausalLM': 'lmdeploy_focus.models.sdar.FocusSDARForCausalLM'}


class SDARConfig(Qwen3Config):
    """SDAR is of Qwen3's shape: with that class `rope_scaling: null` and an unused `sliding_window` mean nothing."""
    model_type = 'sdar'


class SDARMoeConfig(Qwen3MoeConfig):
    """SDAR-MoE is of Qwen3-MoE's shape."""
    model_type = 'sdar_moe'


class FocusSDARModelConfigBuilder(SDARModelConfigBuilder):
    """LMDeploy's builder with the checkpoint's own block length and mask id."""

    @classmethod
    def build(cls, hf_config: Any, model_path: str | None = None, **kwargs: Any) -> ModelConfig:
        """The model config of an SDAR checkpoint.

        A block length that neither the config nor the name tells stays None: LMDeploy then takes its own default.
        """
        config = hf_config.to_dict()
        if not config.get('use_sliding_window'):
            # SDAR's remote config class and a generic one keep the window, and the stock model would use it.
            hf_config.sliding_window = None
        model_config = super().build(hf_config, model_path, **kwargs)
        model_config.dllm_mask_token = mask_token_id(config, model_path)
        model_config.dllm_block_length = checkpoint_block_length(config, model_path)
        return model_config


def register() -> None:
    """Put our config classes, builder and models into the registries; may be called again."""
    for config_class in (SDARConfig, SDARMoeConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    builders = AutoModelConfigBuilder._sub_classes  # the first match wins, and LMDeploy's own comes first by itself
    if builders[0] is not FocusSDARModelConfigBuilder:
        builders.remove(FocusSDARModelConfigBuilder)
        builders.insert(0, FocusSDARModelConfigBuilder)
    CUSTOM_MODULE_MAP.update(FOCUS_CLASSES)


def focus_hf_config(hf_config: Any) -> Any:
    """A copy of the HF config that names our architecture in the place of LMDeploy's.

    Raises:
        ValueError: there is no class of ours for any of its architectures.
    """
    listed = [(hf_config.to_dict().get('auto_map') or {}).get('AutoModelForCausalLM', '').rpartition('.')[2]]
    listed += hf_config.architectures or []
    for architecture in listed:
        if architecture in FOCUS_ARCHITECTURES:
            focus_config = copy.deepcopy(hf_config)
            focus_config.architectures = [FOCUS_ARCHITECTURES[architecture]]
            focus_config.auto_map = {}
            return focus_config
    raise ValueError(f'--focus (focus) is on, but the architectures are {hf_config.architectures}; one must be '
                     f'{" or ".join(FOCUS_ARCHITECTURES)}')


def checkpoint_block_length(config: Mapping[str, Any], model_path: str | None) -> int | None:
    """Block length by the HF config (`block_size`, `block_length`), else by the checkpoint's name, else None."""
    for key in ('block_size', 'block_length'):
        if config.get(key) is not None:
            return config[key]
    return named_block_length(model_path)


def named_block_length(model_path: str | None) -> int | None:
    """Block length of a `-bNN` at the end of a model's name, which a hub cache keeps above `snapshots/<hash>`."""
    if not model_path:
        return None
    path = PurePath(model_path)
    name = path.parent.parent.name if path.parent.name == 'snapshots' else path.name
    match = re.search(r'-b(\d+)$', name)
    length = int(match[1]) if match else None
    return length if length in BLOCK_LENGTHS else None


def mask_token_id(config: Mapping[str, Any], model_path: str | None) -> int:
    """Mask id by the HF config (`mask_token_id`), else by the tokenizer's files, else that of the published SDAR."""
    if config.get('mask_token_id') is not None:
        return config['mask_token_id']
    found = _tokenizer_mask_id(Path(model_path)) if model_path else None
    return SDAR_MASK_TOKEN_ID if found is None else found


def _tokenizer_mask_id(folder: Path) -> int | None:
    config = _read(folder / 'tokenizer_config.json')
    ids = {token['content']: int(index) for index, token in config.get('added_tokens_decoder', {}).items()}
    ids |= _read(folder / 'added_tokens.json')
    declared = config.get('mask_token')
    declared = declared['content'] if isinstance(declared, dict) else declared
    for token in (declared, SDAR_MASK_TOKEN):
        if token in ids:
            return ids[token]
    listed = {token['content']: token['id'] for token in _read(folder / 'tokenizer.json').get('added_tokens', [])}
    return listed.get(declared, listed.get(SDAR_MASK_TOKEN))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}
