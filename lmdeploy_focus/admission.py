"""What is refused before a model is loaded: combinations of options, and checkpoints that do not go with them.

A combination that would not be right is an error with the option's name, never silence and never a wrong answer.
"""
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import BLOCK_LENGTHS, OPTION, FocusEngineConfig

if TYPE_CHECKING:
    from lmdeploy.messages import SpeculativeConfig

# model_type -> architecture of the checkpoints that decode with focus
FOCUS_MODELS = {'sdar': 'SDARForCausalLM', 'sdar_moe': 'SDARMoeForCausalLM', 'llada2_moe': 'LLaDA2MoeModelLM'}


@dataclass(frozen=True)
class Limit:
    """An option that may have only these values; `flag` is None where the command line does not have it."""
    field: str
    flag: str | None
    allowed: tuple[Any, ...]
    why: str

    def check(self, values: Mapping[str, Any], mode: str) -> None:
        value = values[self.field]
        value = getattr(value, 'name', value) if self.field == 'role' else value
        if value not in self.allowed:
            name = f'{self.flag} ({self.field})' if self.flag else self.field
            only = ' or '.join(repr(allowed) for allowed in self.allowed)
            raise ValueError(f'{name} is {value!r}; with {mode} it must be {only}: {self.why}')


_WITH_FOCUS = (
    Limit('device_type', '--device', ('cuda', 'cpu'), 'there are no kernels for other devices'),
    Limit('quant_policy', '--quant-policy', (0,), 'a quantised KV cache takes no scattered rows of a block'),
    Limit('dp', '--dp', (1,), 'ranks would keep different numbers of rows'),
    Limit('ep', '--ep', (1,), 'ranks would keep different numbers of rows'),
    Limit('enable_microbatch', '--enable-microbatch', (False,), 'a step is not split after its rows were chosen'),
    Limit('enable_eplb', '--enable-eplb', (False,), 'it belongs to expert parallelism'),
    Limit('enable_prefix_caching', '--enable-prefix-caching', (False,),
          'a page may hold KV of a block that is not final'),
    Limit('adapters', '--adapters', (None, [], {}), 'rows of a batch would meet the wrong adapter'),
    Limit('role', '--role', ('Hybrid',), 'state of an unfinished block is not handed to another engine'),
    Limit('kv_transfer_config', '--kv-transfer-config', (None,), 'a page may hold KV of a block that is not final'),
    Limit('logprobs_mode', '--logprobs-mode', (None,), 'logprobs of evicted positions do not exist'),
    Limit('enable_return_routed_experts', '--enable-return-routed-experts', (False,),
          'evicted positions are not routed'),
)
_ON_CPU = (
    Limit('quant_policy', '--quant-policy', (0,), 'a quantised KV cache needs a GPU'),
    Limit('tp', '--tp', (1,), 'there is one CPU device'),
    Limit('dp', '--dp', (1,), 'there is one CPU device'),
    Limit('ep', '--ep', (1,), 'there is one CPU device'),
    Limit('distributed_executor_backend', '--distributed-executor-backend', (None, 'uni'), 'there is one CPU device'),
)
FOCUS_ON = OPTION['focus'].flag
ON_CPU = f'{OPTION["device_type"].flag} cpu'
GPU_DTYPES = ('auto', 'float16', 'bfloat16')  # LMDeploy's; tests of arithmetic take float32 too


def check_combination(values: Mapping[str, Any]) -> None:
    """Check what can be told without the checkpoint. `values` has every field of `FocusEngineConfig` by name.

    Raises:
        ValueError: an option does not go with `focus`, with `device_type='cpu'` or with the block length; the message
            has its flag, its field, the value and the bound.
    """
    on_cpu = values['device_type'] == 'cpu'
    if values['dtype'] not in GPU_DTYPES and not on_cpu:
        raise ValueError(f'--dtype (dtype) is {values["dtype"]}; it must be one of {", ".join(GPU_DTYPES)} without '
                         f'{ON_CPU}')
    if on_cpu:
        for limit in _ON_CPU:
            limit.check(values, ON_CPU)
    if not values['focus']:
        return
    for limit in _WITH_FOCUS:
        limit.check(values, FOCUS_ON)
    if values['tp'] < 1:
        raise ValueError(f'--tp (tp) is {values["tp"]}; it must be at least 1')
    if 'memory_model_path' in (values['hf_overrides'] or {}):
        raise ValueError(f'--hf-overrides (hf_overrides) has memory_model_path; with {FOCUS_ON} it must not: '
                         'MemDecode mixes the logits of whole blocks')
    _check_page(values)
    if values['dllm_block_length'] is not None:
        _check_block_length(values['dllm_block_length'], 'option', values)


def admit(model_path: str, config: FocusEngineConfig, trust_remote_code: bool = False,
          speculative_config: 'SpeculativeConfig | None' = None) -> None:
    """Check the options as they are now, and the checkpoint against them, before a model is loaded.

    Of the checkpoint only `config.json` and the tokenizer's files are read, as data: `trust_remote_code` is part of the
    signature for the callers' sake and changes nothing.

    Raises:
        ValueError: the message has the option or the checkpoint's field, the value and the bound.
    """
    from .dflash.config import DFlashConfig
    config.validate()
    if isinstance(speculative_config, DFlashConfig):
        from .dflash.admission import admit_dflash
        admit_dflash(model_path, config, speculative_config)
    elif speculative_config is not None and (config.focus or config.device_type == 'cpu'):
        raise ValueError(f'--speculative-algorithm (speculative_config) is {speculative_config.method!r}; it must not '
                         f'be given with {FOCUS_ON if config.focus else ON_CPU}')
    if not config.focus:
        check_without_focus(model_path, config)
        return
    checkpoint = read_config(model_path, config)
    overridden = {**checkpoint, **(config.hf_overrides or {})}
    _check_architecture(model_path, overridden)
    _check_fields(model_path, overridden)
    _check_deterministic(model_path, overridden, config.focus_deterministic)
    if overridden.get('use_sliding_window') and overridden.get('sliding_window'):
        raise ValueError(f'sliding_window of {model_path} is {overridden["sliding_window"]!r} and in use; with '
                         f'{FOCUS_ON} use_sliding_window must be false')
    _check_ranks(model_path, overridden, config.tp)
    length = resolve_block_length(model_path, config)
    source = 'checkpoint' if config.dllm_block_length is None else 'option'
    _check_block_length(length, source, vars(config))
    _check_mask_token(model_path, checkpoint)


def check_without_focus(model_path: str, config: Any) -> None:
    """Check the checkpoint of an engine with focus off, where that runs a model of ours: LLaDA2's.

    Raises:
        ValueError: the message has the checkpoint's field, its value and what it must be.
    """
    from .models.configs import LLADA2, mask_token_id
    try:
        checkpoint = read_config(model_path, config)
    except ValueError:  # LMDeploy's to complain about
        return
    if checkpoint.get('model_type') == LLADA2:
        _check_fields(model_path, {**checkpoint, **(config.hf_overrides or {})})
        mask_token_id(checkpoint, model_path)


def resolve_block_length(model_path: str, config: FocusEngineConfig) -> int:
    """Block length by the option, else the checkpoint's config, else its name.

    Raises:
        ValueError: none of them tells.
    """
    from .models.configs import checkpoint_block_length
    length = config.dllm_block_length
    if length is None:
        length = checkpoint_block_length(read_config(model_path, config), model_path)
    if length is None:
        option = OPTION['dllm_block_length']
        raise ValueError(f'{option.flag} ({option.field}) is not given, and neither config.json nor the name of '
                         f'{model_path} tells the block length; it must be {option.bound}')
    return length


def _check_page(values: Mapping[str, Any]) -> None:
    """LMDeploy asserts the same, but names the option that was not given."""
    flag, field = '--kernel-block-size', 'kernel_block_size'
    if values[field] == -1:
        flag, field = '--cache-block-seq-len', 'block_size'
    page = values[field]
    if page < 16 or page & (page - 1):
        raise ValueError(f'{flag} ({field}) is {page}; it must be a power of two >= 16')


def _check_block_length(length: Any, source: str, values: Mapping[str, Any]) -> None:
    option = OPTION['dllm_block_length']
    name = f'{option.flag} ({option.field})'
    if source == 'checkpoint':
        name += ', by the checkpoint,'
    if length not in BLOCK_LENGTHS:
        raise ValueError(f'{name} is {length!r}; it must be {option.bound}')
    page = values['block_size']
    kernel_page = page if values['kernel_block_size'] == -1 else values['kernel_block_size']
    for flag, field, size in (('--cache-block-seq-len', 'block_size', page),
                              ('--kernel-block-size', 'kernel_block_size', kernel_page)):
        if size % length:
            raise ValueError(f'{name} is {length}; it must divide the KV page, and {flag} ({field}) is {size}')
    steps, limit = values['dllm_denoising_steps'], values['max_prefill_token_num']
    if steps is not None and steps > length:
        raise ValueError(f'--dllm-denoising-steps (dllm_denoising_steps) is {steps}; it must be at most the block '
                         f'length, {length}')
    if limit < length or limit % length:
        raise ValueError(f'--max-prefill-token-num (max_prefill_token_num) is {limit}; it must be a multiple of the '
                         f'block length, {length}: a long prompt is cut there')


def _check_architecture(model_path: str, checkpoint: Mapping[str, Any]) -> None:
    model_type = checkpoint.get('model_type')
    remote = (checkpoint.get('auto_map') or {}).get('AutoModelForCausalLM', model_type)
    architecture = str((checkpoint.get('architectures') or [remote])[0]).rpartition('.')[2]
    if FOCUS_MODELS.get(str(model_type)) == architecture:
        return
    raise ValueError(f'{FOCUS_ON} (focus) is on, but {architecture} (model_type {model_type!r}) of {model_path} '
                     f'is not a block-diffusion model; the model must be {" or ".join(FOCUS_MODELS.values())}')


def _check_fields(model_path: str, checkpoint: Mapping[str, Any]) -> None:
    from .models.configs import check_fields
    check_fields(checkpoint, model_path)


def _check_deterministic(model_path: str, checkpoint: Mapping[str, Any], deterministic: bool) -> None:
    experts = checkpoint.get('num_experts')
    if deterministic and experts:
        option = OPTION['focus_deterministic']
        raise ValueError(f'{option.flag} ({option.field}) is True; it must be off for {model_path}, which has '
                         f'num_experts {experts}: the products of experts are not row-invariant')


def _check_ranks(model_path: str, checkpoint: Mapping[str, Any], ranks: int) -> None:
    heads = checkpoint.get('num_key_value_heads')
    if isinstance(heads, int) and heads % ranks:
        raise ValueError(f'--tp (tp) is {ranks}; with {FOCUS_ON} it must divide num_key_value_heads of {model_path}, '
                         f'{heads}: every rank ranks masked tokens by key heads of its own')


def _check_mask_token(model_path: str, checkpoint: Mapping[str, Any]) -> None:
    from .models.configs import mask_token_id
    mask, vocabulary = mask_token_id(checkpoint, model_path), checkpoint.get('vocab_size')
    if vocabulary is not None and not 0 <= mask < vocabulary:
        raise ValueError(f'mask_token_id of {model_path} is {mask!r}; it must be at least 0 and below vocab_size, '
                         f'{vocabulary}')


def read_config(model_path: str, config: Any) -> dict[str, Any]:
    """The checkpoint's config.json as LMDeploy's config builder sees it, without `hf_overrides`.

    Raises:
        ValueError: there is none that can be read.
    """
    from transformers import PretrainedConfig
    wanted = f'model_path is {str(model_path)!r}; it must be a checkpoint with a readable config.json'
    try:
        checkpoint, _ = PretrainedConfig.get_config_dict(model_path, cache_dir=config.download_dir,
                                                         revision=config.revision)
    except OSError as error:
        raise ValueError(f'{wanted}: {str(error).splitlines()[0]}') from error
    if not checkpoint:
        raise ValueError(wanted)
    return checkpoint
