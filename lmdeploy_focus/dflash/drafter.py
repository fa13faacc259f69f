"""What a drafter's config.json says. The published ones are of two generations, which put the same facts elsewhere.

Source of the fields: the checkpoints of the paper's authors (arXiv 2602.06036) and LMDeploy's
`spec_decode/dflash_utils.py`.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL, SLIDING = 'full_attention', 'sliding_attention'
ARCHITECTURE = 'DFlashDraftModel'
# Of later designs, which need weights and steps that a DFlash v1 network does not have.
_LATER = ('conv_kernel_size', 'conv_group_size', 'selector_rank', 'selector_top_k', 'final_logit_softcapping',
          'output_multiplier', 'markov_rank', 'attention_sink_bias', 'add_swa_attention_sink_bias')


@dataclass(frozen=True)
class Drafter:
    """A drafter, read and checked for itself.

    name: folder or hub name, for the messages
    block_size: positions of a block, the known token at its beginning included
    mask_token_id: token of the target whose embedding stands for a position to be drafted
    target_layer_ids: layers of the target whose output is the context; None is the default spread
    num_target_layers, vocab_size: of the target that it was trained for; None where the config does not tell
    layer_types: FULL or SLIDING, one a layer
    sliding_window: keys that a row of a sliding layer sees, its own included; None without such layers
    causal: whether a row sees the block's later rows; None is no in full layers, yes in sliding ones
    """
    name: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...] | None
    num_target_layers: int | None
    vocab_size: int | None
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    dtype: str | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: bool | None

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target with that many whose output is the context; without a list in the config, as many as
        the drafter has layers, evenly spread.

        Raises:
            ValueError: the target has too few layers to spread them.
        """
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        from lmdeploy.pytorch.spec_decode.dflash_utils import build_target_layer_ids
        return build_target_layer_ids(num_layers, len(self.layer_types))

    def normalise(self, hf_config: Any, tensors: Mapping[str, Sequence[int]]) -> None:
        """Write the facts where LMDeploy's network looks for them, what tensors it must have, and our architecture."""
        hf_config.layer_types = list(self.layer_types)
        hf_config.sliding_window = self.sliding_window
        hf_config.dflash_config = {'block_size': self.block_size, 'mask_token_id': self.mask_token_id,
                                   'causal': self.causal, 'name': self.name,
                                   'tensors': {name: list(shape) for name, shape in tensors.items()}}
        hf_config.architectures, hf_config.auto_map = ['FocusDFlashDraftModel'], {}


def read_drafter(name: str) -> Drafter:
    """Read config.json of a folder or of a hub's repository.

    Raises:
        ValueError: there is none, it is not JSON, or it is not a DFlash drafter's; the message names the field.
    """
    from transformers import PretrainedConfig
    wanted = f'--dflash (draft) is {name!r}; it must be a DFlash drafter with a readable config.json'
    try:
        config, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        raise ValueError(f'{wanted}: {str(error).splitlines()[0]}') from error
    if not config:
        raise ValueError(wanted)
    return parse_drafter(config, name)


def parse_drafter(config: Mapping[str, Any], name: str) -> Drafter:
    """The drafter that a config.json describes.

    Raises:
        ValueError: the message has the field, its value and what it must be.
    """
    architectures = config.get('architectures') or []
    nested = config.get('dflash_config')
    if ARCHITECTURE not in architectures or not isinstance(nested, Mapping):
        raise ValueError(f'--dflash (draft) is {name!r}, whose architectures are {architectures!r} and whose '
                         f'dflash_config is {nested!r}; it must be a {ARCHITECTURE} with a dflash_config')
    read = _Fields(config, nested, name)
    for field in _LATER:
        if read.either(field):
            raise read.wrong(field, read.either(field), 'absent: only DFlash v1 is supported')
    if config.get('quantization_config'):
        raise read.wrong('quantization_config', config['quantization_config'], 'absent: a drafter is not quantised')
    heads, hidden = read.count('num_attention_heads'), read.count('hidden_size')
    layer_types, window = _layers(read)
    return Drafter(name=name,
                   block_size=read.count('block_size', at_least=2),
                   mask_token_id=read.count('mask_token_id', at_least=0),
                   target_layer_ids=_layer_ids(read),
                   num_target_layers=read.count('num_target_layers', optional=True),
                   vocab_size=read.count('vocab_size', optional=True),
                   hidden_size=hidden,
                   intermediate_size=read.count('intermediate_size'),
                   num_heads=heads,
                   num_kv_heads=read.count('num_key_value_heads', optional=True) or heads,
                   head_dim=read.count('head_dim', optional=True) or hidden // heads,
                   attention_bias=bool(config.get('attention_bias')),
                   dtype=config.get('dtype') or config.get('torch_dtype'),
                   layer_types=layer_types,
                   sliding_window=window,
                   causal=_causal(read))


class _Fields:
    """Fields of config.json; those of DFlash are at the top or in `dflash_config`, depending on the generation."""

    def __init__(self, config: Mapping[str, Any], nested: Mapping[str, Any], name: str) -> None:
        self.config, self.nested, self.name = config, nested, name

    def either(self, field: str) -> Any:
        inner, outer = self.nested.get(field), self.config.get(field)
        if inner is not None and outer is not None and inner != outer:
            raise self.wrong(field, outer, f'the same as in dflash_config, {inner!r}')
        return outer if inner is None else inner

    def count(self, field: str, at_least: int = 1, optional: bool = False) -> Any:
        value = self.either(field)
        if value is None and optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.wrong(field, value, f'a whole number of at least {at_least}')
        return value

    def wrong(self, field: str, value: Any, bound: str) -> ValueError:
        return ValueError(f'{field} of {self.name} is {value!r}; it must be {bound}')


def _layer_ids(read: _Fields) -> tuple[int, ...] | None:
    ids = read.either('target_layer_ids')
    if ids is None:
        return None
    whole = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or ids[0] < 0 or any(i >= j for i, j in zip(ids, ids[1:], strict=False)):
        raise read.wrong('target_layer_ids', ids, 'a list of layers in ascending order')
    return tuple(ids)


def _layers(read: _Fields) -> tuple[tuple[str, ...], int | None]:
    config, layers = read.config, read.count('num_hidden_layers')
    window = config.get('sliding_window') if config.get('use_sliding_window', True) else None
    window = read.nested.get('swa_window_size') or read.nested.get('sliding_window') or window
    types = config.get('layer_types')
    if types is None:
        # As transformers fills it in: the first `max_window_layers` have no window.
        full = config.get('max_window_layers', layers) if window else layers
        types = [FULL if layer < full else SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, SLIDING}:
        raise read.wrong('layer_types', types, f'a list of {layers} times {FULL} or {SLIDING}, one a layer')
    if SLIDING not in types:
        if read.either('use_swa'):
            raise read.wrong('use_swa', True, f'false, as layer_types has no {SLIDING}')
        return tuple(types), None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise read.wrong('sliding_window', window, f'at least 1 and in use, as layer_types has {SLIDING}')
    return tuple(types), window


def _causal(read: _Fields) -> bool | None:
    for field in ('causal', 'is_causal'):
        value = read.either(field)
        if value is not None:
            if not isinstance(value, bool):
                raise read.wrong(field, value, 'true or false')
            return value
    return None
