"""LLaDA2 checkpoints: config class, config builder, and what is refused of a config."""
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.configurations import AutoModelConfigBuilder
from lmdeploy.pytorch.configurations.default import DefaultModelConfigBuilder
from transformers import Qwen3MoeConfig

from . import configs, token_editing
from .tensors import FP8_BLOCK

_SIZES = ('hidden_size', 'intermediate_size', 'moe_intermediate_size', 'num_hidden_layers', 'num_attention_heads',
          'num_key_value_heads', 'num_experts', 'num_experts_per_tok', 'n_group', 'topk_group', 'vocab_size')
# Fields without which the class's defaults, which are Qwen3-MoE's, would pass for the checkpoint's.
_REQUIRED = (*_SIZES, 'first_k_dense_replace', 'num_shared_experts', 'routed_scaling_factor', 'rms_norm_eps')
_FIXED = {'score_function': 'sigmoid', 'moe_router_enable_expert_bias': True, 'router_dtype': 'fp32',
          'norm_topk_prob': True, 'use_qk_norm': True}
_ABSENT = ('use_bias', 'use_qkv_bias', 'attention_bias', 'using_split_qkv_in_self_attention', 'norm_head')
_ROUTER_FIELDS = (*_FIXED, 'n_group', 'topk_group', 'routed_scaling_factor', 'output_router_logits',
                  'router_aux_loss_coef')
# What the config builder leaves in the HF config for the model: why it must not run, and fields about token editing
# of generation_config.json.
REFUSAL, GENERATION_FIELDS = 'focus_refusal', 'focus_generation_fields'


class LLaDA2MoeConfig(Qwen3MoeConfig):
    """Qwen3-MoE's class with the fields that LLaDA2 has besides: `rope_scaling: null` and an unused `sliding_window`
    then mean nothing."""
    model_type = 'llada2_moe'


class LLaDA2ModelConfigBuilder(AutoModelConfigBuilder):
    """What LMDeploy has to know of a LLaDA2 checkpoint."""

    @classmethod
    def condition(cls, hf_config: Any) -> bool:
        """Whether the config is LLaDA2's."""
        return hf_config.model_type == LLaDA2MoeConfig.model_type

    @classmethod
    def build(cls, hf_config: Any, model_path: str | None = None, **kwargs: Any) -> ModelConfig:
        """The model config.

        What is wrong with the checkpoint is told by the model, which is built next: LMDeploy's environment check builds
        the config first, and turns whatever that raises into exit status 1 with the advice to file an issue.
        """
        fields = {**hf_config.to_dict(), 'num_experts': hf_config.num_experts}
        folder = None if model_path is None else Path(model_path)
        mask = -1
        try:
            # the class fills in what the file lacks
            check_config((configs.read_json(folder / 'config.json') if folder else {}) or fields)
            mask = configs.mask_token_id(fields, model_path)
        except ValueError as error:
            setattr(hf_config, REFUSAL, str(error))
        generation = configs.read_json(folder / 'generation_config.json') if folder else {}
        setattr(hf_config, GENERATION_FIELDS, token_editing.fields(generation))
        # of a refused one not even the sizes can be relied on
        readable = LLaDA2MoeConfig() if hasattr(hf_config, REFUSAL) else hf_config
        model_config = DefaultModelConfigBuilder.build(readable, model_path, **kwargs)
        model_config.hf_config = model_config.llm_config = hf_config
        model_config.model_paradigm = 'dllm'
        model_config.dllm_mask_token = mask
        model_config.dllm_block_length = configs.checkpoint_block_length(fields, model_path)
        return model_config


def check_built(hf_config: Any) -> None:
    """Refuse what the model does not compute, of a config as the builder and `hf_overrides` left it.

    Raises:
        ValueError: the message has the field, its value and what it must be.
    """
    if getattr(hf_config, REFUSAL, None):
        raise ValueError(getattr(hf_config, REFUSAL))
    config = {**hf_config.to_dict(), 'num_experts': hf_config.num_experts}
    check_config(config)
    token_editing.check(config, getattr(hf_config, GENERATION_FIELDS, {}))


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what the model does not compute.

    Args:
        config: of config.json.

    Raises:
        ValueError: the message has the field, its value and what it must be.
    """
    rope = config.get('rope_parameters') or {}  # where transformers 5 keeps what older config.json have at the top
    for field in (*_REQUIRED, 'rope_theta', 'partial_rotary_factor'):
        if config.get(field) is None and rope.get(field) is None:
            raise ValueError(f'{field} of config.json is missing; LLaDA2 must have it')
    for field in _SIZES:
        if not isinstance(config[field], int) or config[field] < 1:
            raise _refused(field, config, 'a whole number of at least 1')
    for field, value in _FIXED.items():
        if config.get(field) != value:
            raise _refused(field, config, repr(value))
    for field in _ABSENT:
        if config.get(field):
            raise _refused(field, config, 'false')
    if config.get('hidden_act', 'silu') != 'silu':
        raise _refused('hidden_act', config, "'silu'")
    if config.get('use_sliding_window') and config.get('sliding_window'):
        raise _refused('sliding_window', config, 'out of use (use_sliding_window false): a block sees all before it')
    configs.check_router_fields(config, _ROUTER_FIELDS)
    _check_groups(config)
    _check_quantisation(config)


def _check_groups(config: Mapping[str, Any]) -> None:
    experts, groups = config['num_experts'], config['n_group']
    if experts % groups or experts // groups < 2:
        raise _refused('n_group', config, f'a divisor of num_experts, {experts}, with at least 2 experts a group')
    if config['topk_group'] > groups:
        raise _refused('topk_group', config, f'at most n_group, {groups}')
    if config['num_experts_per_tok'] > config['topk_group'] * (experts // groups):
        raise _refused('num_experts_per_tok', config,
                       f'at most the {config["topk_group"] * (experts // groups)} experts of topk_group groups')


def _check_quantisation(config: Mapping[str, Any]) -> None:
    """LMDeploy's blocked FP8 alone: it is what can be cut out of a fused QKV product."""
    quantisation = config.get('quantization_config')
    if quantisation is None:
        return
    method, block = quantisation.get('quant_method'), quantisation.get('weight_block_size')
    if method != 'fp8' or list(block or ()) != [FP8_BLOCK, FP8_BLOCK]:
        raise ValueError(f'quantization_config of config.json has quant_method {method!r} and weight_block_size '
                         f"{block!r}; with LLaDA2 they must be 'fp8' and {[FP8_BLOCK, FP8_BLOCK]}")
    size = config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']
    if size % FP8_BLOCK:
        raise ValueError(f'head_dim of config.json is {size}; with FP8 weights (quantization_config) it must be a '
                         f'multiple of {FP8_BLOCK}: a block of scales would cover rows of two heads')


def _refused(field: str, config: Mapping[str, Any], must_be: str) -> ValueError:
    return ValueError(f'{field} of config.json is {config.get(field)!r}; with LLaDA2 it must be {must_be}')
