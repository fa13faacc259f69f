"""What is refused before a model is loaded: a drafter for another target, and options that do not go with DFlash."""
from collections.abc import Mapping
from typing import Any

from ..admission import FOCUS_MODELS, FOCUS_ON, Limit, read_config
from .checkpoint import check_tensors, read_shapes, tensor_shapes
from .config import DFLASH_ON, DFlashConfig
from .drafter import Drafter, read_drafter
from .targets import TARGETS

LIMITS = (
    Limit('device_type', '--device', ('cpu', ), 'there are no kernels for other devices yet'),
    Limit('quant_policy', '--quant-policy', (0, ), "the drafter's KV cache is not quantised"),
    Limit('tp', '--tp', (1, ), 'the drafter runs on one device'),
    Limit('dp', '--dp', (1, ), 'the drafter runs on one device'),
    Limit('ep', '--ep', (1, ), 'the drafter runs on one device'),
    Limit('enable_microbatch', '--enable-microbatch', (False, ), 'a batch is drafted and verified as one'),
    Limit('adapters', '--adapters', (None, [], {}), 'the drafter was trained for the plain target'),
    Limit('role', '--role', ('Hybrid', ), "the drafter's KV cache is not handed to another engine"),
    Limit('kv_transfer_config', '--kv-transfer-config', (None, ), "the drafter's KV cache is not handed on"),
    Limit('enable_return_routed_experts', '--enable-return-routed-experts', (False, ),
          'rejected tokens are routed too'),
)


def admit_dflash(model_path: str, config: Any, dflash: DFlashConfig) -> Drafter:
    """Check engine options, target and drafter against each other; only config.json and the headers of the drafter's
    files are read.

    Args:
        model_path: folder or hub name of the target.
        config: LMDeploy's PyTorch engine config, or ours.
        dflash: the drafter and how many tokens it drafts.

    Returns:
        What the drafter's config.json says.

    Raises:
        ValueError: the message has the option or the field, its value and what it must be.
    """
    check_options(vars(config))
    target = {**read_config(model_path, config), **(config.hf_overrides or {})}
    check_target(model_path, target)
    drafter = read_drafter(dflash.model)
    check_pair(model_path, target, drafter)
    shapes = read_shapes(dflash.model)
    if shapes is not None:
        features = drafter.layers_of(target['num_hidden_layers'])
        check_tensors(shapes, tensor_shapes(drafter, target['hidden_size'], len(features)), dflash.model)
    return drafter


def check_options(values: Mapping[str, Any]) -> None:
    """Check the engine options by themselves.

    Args:
        values: the fields of LMDeploy's PyTorch engine config, or of ours.

    Raises:
        ValueError: one does not go with DFlash; the message has its flag, its field, the value and the bound.
    """
    if values.get('focus'):
        raise ValueError(f'{FOCUS_ON} (focus) is on; it must be off with {DFLASH_ON} (speculative_config): a target of '
                         'DFlash is autoregressive')
    for limit in LIMITS:
        limit.check(values, DFLASH_ON)


def admit_engine(model_path: str, backend: str | None, config: Any, dflash: DFlashConfig) -> None:
    """The same for what LMDeploy's `AsyncEngine` gets, which passes over a drafter that its backend cannot use.

    Raises:
        ValueError: the backend is not the PyTorch engine, or see `admit_dflash`.
    """
    if backend != 'pytorch' or config is None:
        raise ValueError(f'backend_config is {type(config).__name__} of the backend {backend!r}; with {DFLASH_ON} '
                         '(speculative_config) it must be PytorchEngineConfig or FocusEngineConfig')
    admit_dflash(model_path, config, dflash)


def check_target(model_path: str, target: Mapping[str, Any]) -> None:
    """Refuse a target whose model class does not hand out hidden states, by the name of its architecture.

    Raises:
        ValueError: see there.
    """
    architecture = str((target.get('architectures') or [target.get('model_type')])[0]).rpartition('.')[2]
    only = f'the model must be {" or ".join(TARGETS)}'
    if target.get('model_type') in FOCUS_MODELS:
        raise ValueError(f'{DFLASH_ON} (speculative_config) is given, but {architecture} of {model_path} is a '
                         f'block-diffusion model; {only}')
    if architecture not in TARGETS:
        raise ValueError(f'{DFLASH_ON} (speculative_config) is given, but the hidden states of {architecture} of '
                         f'{model_path} cannot be had; {only}')
    if target.get('use_sliding_window') and target.get('sliding_window'):
        raise ValueError(f'sliding_window of {model_path} is {target["sliding_window"]!r} and in use; with {DFLASH_ON} '
                         'use_sliding_window must be false: target and drafter share their pages')


def check_pair(model_path: str, target: Mapping[str, Any], drafter: Drafter) -> None:
    """Refuse a drafter that was trained for another target.

    Args:
        model_path: of the target, for the messages.
        target: the target's config.json.
        drafter: the drafter.

    Raises:
        ValueError: depth, hidden size, vocabulary, mask id or the chosen layers do not fit; the message has the field
            of the drafter, its value and the target's.
    """
    for field, value, of_target in (
            ('num_target_layers', drafter.num_target_layers, 'num_hidden_layers'),
            ('hidden_size', drafter.hidden_size, 'hidden_size'),
            ('vocab_size', drafter.vocab_size, 'vocab_size'),
    ):
        if value is not None and value != target[of_target]:
            raise ValueError(f'{field} of {drafter.name} is {value}; it must be {of_target} of the target '
                             f'{model_path}, {target[of_target]}: this drafter belongs to another target')
    if drafter.mask_token_id >= target['vocab_size']:
        raise ValueError(f'mask_token_id of {drafter.name} is {drafter.mask_token_id}; it must be below vocab_size of '
                         f'the target {model_path}, {target["vocab_size"]}')
    deepest = target['num_hidden_layers'] - 1
    if drafter.target_layer_ids is not None and drafter.target_layer_ids[-1] > deepest:
        raise ValueError(f'target_layer_ids of {drafter.name} is {list(drafter.target_layer_ids)}; each must be at '
                         f'most {deepest}, the last layer of the target {model_path}')
