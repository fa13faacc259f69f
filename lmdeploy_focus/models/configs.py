"""What LMDeploy has to know of a checkpoint before it builds the model: config, block length, mask id.

Everything is read from the checkpoint's own files as data; `--trust-remote-code` is never needed.
"""
import copy
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.configurations import AutoModelConfigBuilder
from lmdeploy.pytorch.configurations.sdar import SDARModelConfigBuilder
from lmdeploy.pytorch.models.module_map import CUSTOM_MODULE_MAP
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils.hub import cached_file

from ..config import BLOCK_LENGTHS

MASK_TOKENS = ('<|MASK|>', '<|mask|>')  # SDAR's and LLaDA2's
SDAR_MASK_TOKEN_ID = 151669
LLADA2 = 'llada2_moe'
LLADA2_BLOCK_LENGTH = 32
# Read by the model, or of training alone.
SDAR_MOE_ROUTER_FIELDS = ('norm_topk_prob', 'router_n_groups', 'router_aux_loss_coef', 'output_router_logits')
_ABOUT_ROUTING = re.compile(r'router|gating|scor(e|ing)_func|topk|n_group|expert_bias|routed_scaling')

# The checkpoint's architecture -> ours with focus, under a name of its own, so that registering it changes nothing for
# stock configs.
FOCUS_ARCHITECTURES = {'SDARForCausalLM': 'FocusSDARForCausalLM', 'SDARMoeForCausalLM': 'FocusSDARMoeForCausalLM',
                       'LLaDA2MoeModelLM': 'FocusLLaDA2MoeModelLM'}
# LLaDA2 without focus too: LMDeploy has no model of it.
CLASSES = {'FocusSDARForCausalLM': 'lmdeploy_focus.models.sdar.FocusSDARForCausalLM',
           'FocusSDARMoeForCausalLM': 'lmdeploy_focus.models.sdar_moe.FocusSDARMoeForCausalLM',
           'FocusLLaDA2MoeModelLM': 'lmdeploy_focus.models.llada2.FocusLLaDA2MoeModelLM',
           'LLaDA2MoeModelLM': 'lmdeploy_focus.models.llada2.LLaDA2MoeModelLM'}


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
    """Put our config classes, builders and models into the registries; may be called again."""
    from .llada2_config import LLaDA2MoeConfig  # its builder registers itself
    for config_class in (SDARConfig, SDARMoeConfig, LLaDA2MoeConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    builders = AutoModelConfigBuilder._sub_classes  # the first match wins, and LMDeploy's own comes first by itself
    if builders[0] is not FocusSDARModelConfigBuilder:
        builders.remove(FocusSDARModelConfigBuilder)
        builders.insert(0, FocusSDARModelConfigBuilder)
    CUSTOM_MODULE_MAP.update(CLASSES)


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


def check_fields(config: Mapping[str, Any], model_path: str | None = None) -> None:
    """Refuse a config that asks for what the model does not compute.

    Args:
        config: of config.json, of a model with focus, or of LLaDA2.
        model_path: its folder or repository, for what generation_config.json asks for.

    Raises:
        ValueError: the message has the field, its value and what it must be.
    """
    if config.get('model_type') == LLADA2:
        from . import token_editing
        from .llada2_config import check_config
        check_config(config)
        token_editing.check(config, _read(model_path, 'generation_config.json', from_hub=True) if model_path else {})
    elif config.get('model_type') == SDARMoeConfig.model_type:
        check_router_fields(config, SDAR_MOE_ROUTER_FIELDS)


def check_router_fields(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a config with a field about routing that is in use and that the model does not know.

    Raises:
        ValueError: the message has the field and its value.
    """
    for field, value in config.items():
        if _ABOUT_ROUTING.search(field) and field not in known and value:
            raise ValueError(f'{field} of config.json is {value!r}; it must be absent: the router of '
                             f'{config.get("model_type")} knows only {", ".join(sorted(known))}')


def checkpoint_block_length(config: Mapping[str, Any], model_path: str | None) -> int | None:
    """Block length by the HF config (`block_size`, `block_length`), else by the checkpoint's name, else that of all
    published LLaDA2, else None."""
    for key in ('block_size', 'block_length'):
        if config.get(key) is not None:
            return config[key]
    named = named_block_length(model_path)
    return LLADA2_BLOCK_LENGTH if named is None and config.get('model_type') == LLADA2 else named


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
    """Mask id by the HF config (`mask_token_id`), else by the tokenizer's files, else that of the published SDAR.

    Raises:
        ValueError: neither tells, and the model is not SDAR.
    """
    if config.get('mask_token_id') is not None:
        return config['mask_token_id']
    found = _tokenizer_mask_id(model_path, config.get('model_type') == LLADA2) if model_path else None
    if found is None and config.get('model_type') == LLADA2:
        raise ValueError(f'mask_token_id of {model_path} is missing; config.json must have it, or its tokenizer a '
                         f'mask_token or {" or ".join(MASK_TOKENS)}')
    return SDAR_MASK_TOKEN_ID if found is None else found


def _tokenizer_mask_id(model_path: str, from_hub: bool) -> int | None:
    """Args:
        from_hub: get the files of a model that is named by its repository and not downloaded yet.
    """

    def read(name: str) -> dict[str, Any]:
        return _read(model_path, name, from_hub)

    config = read('tokenizer_config.json')
    ids = {token['content']: int(index) for index, token in config.get('added_tokens_decoder', {}).items()}
    ids |= read('added_tokens.json')
    declared = config.get('mask_token')
    declared = declared['content'] if isinstance(declared, dict) else declared
    names = (declared, *MASK_TOKENS)
    found = next((ids[name] for name in names if name in ids), None)
    if found is not None:
        return found
    listed = {token['content']: token['id'] for token in read('tokenizer.json').get('added_tokens', [])}
    return next((listed[name] for name in names if name in listed), None)


def _read(model_path: str, name: str, from_hub: bool) -> dict[str, Any]:
    path = Path(model_path) / name
    if from_hub and not Path(model_path).is_dir():
        found = cached_file(model_path, name, _raise_exceptions_for_gated_repo=False,
                            _raise_exceptions_for_missing_entries=False,
                            _raise_exceptions_for_connection_errors=False)
        path = Path(found) if found else path
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    return json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}
