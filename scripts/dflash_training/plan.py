"""What follows from the target's config and tokenizer: the drafter's shape, the layers it sees, its mask token."""
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.demo_models.network import Shape

from .options import Options

_RESERVED = re.compile(r'reserved|unused|extra_?id|placeholder', re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """The drafter to be trained.

    shape: of its layers, the target's but for their number.
    target_layers: of the target, ascending; num_target_layers: how many the target has.
    max_positions: of the target.
    stop_ids: tokens that end an answer, at least one.
    """

    shape: Shape
    target_layers: tuple[int, ...]
    num_target_layers: int
    max_positions: int
    block_size: int
    mask_token: int
    stop_ids: tuple[int, ...]


def read_target(name: str) -> tuple[Any, Any, Any]:
    """Config, tokenizer and generation config of a target; no weights are read.

    Raises:
        ValueError: one cannot be had; the message names the target.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    try:
        config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f'TARGET is {name!r}; it must be a folder or a hub name with the config.json and the '
                         f'tokenizer of a causal language model: {str(error).splitlines()[0]}') from error
    try:
        return config, tokenizer, GenerationConfig.from_pretrained(name)
    except OSError:
        return config, tokenizer, GenerationConfig.from_model_config(config)


def make_plan(options: Options, config: Any, tokenizer: Any, generation: Any) -> Plan:
    """The plan of a run.

    Raises:
        ValueError: an option does not fit the target; the message has option, value and bound.
    """
    text = config.get_text_config()
    shape = _draft_shape(text, options)
    positions = getattr(text, 'max_position_embeddings', None) or 1 << 20
    longest = options.max_prompt_tokens + options.max_new_tokens + options.block_size
    if longest > positions:
        raise ValueError(f'--max-prompt-tokens {options.max_prompt_tokens}, --max-new-tokens {options.max_new_tokens} '
                         f'and --block-size {options.block_size} are {longest} together; they must be at most the '
                         f'{positions} positions of the target')
    stop_ids = _stop_ids(generation.eos_token_id, text, tokenizer)
    mask = options.mask_token
    if mask is None:
        mask = _unused_token(tokenizer, shape.vocabulary, stop_ids)
    if mask >= shape.vocabulary:
        raise ValueError(f'--mask-token is {mask}; it must be at most {shape.vocabulary - 1}, the last id of the '
                         'target')
    if mask in stop_ids:
        raise ValueError(f'--mask-token is {mask}; it must be none of the stop tokens {list(stop_ids)}')
    return Plan(shape, _target_layers(options, text.num_hidden_layers), text.num_hidden_layers, positions,
                options.block_size, mask, stop_ids)


def _draft_shape(text: Any, options: Options) -> Shape:
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_size = getattr(text, 'head_dim', None) or hidden // heads
    intermediate = getattr(text, 'intermediate_size', None)
    if head_size % 2:
        raise ValueError(f"TARGET {options.target} has heads of {head_size}; the drafter has heads of the target's "
                         'size, which must be even for its rotary embedding')
    return Shape(vocabulary=text.vocab_size, hidden=hidden, layers=options.layers, heads=heads,
                 kv_heads=getattr(text, 'num_key_value_heads', None) or heads, head_size=head_size,
                 intermediate=intermediate if isinstance(intermediate, int) else 4 * hidden,
                 rope_theta=rope_theta(text), epsilon=getattr(text, 'rms_norm_eps', None) or 1e-6)


def rope_theta(config: Any) -> float:
    """Base of the rotary embedding in a config of either generation; 10000 where there is none. The drafter rotates
    with it as it is, without the target's scaling: it has learned its own."""
    parameters = getattr(config, 'rope_parameters', None) or {}
    parameters = parameters.get('full_attention') or parameters
    return float(parameters.get('rope_theta') or getattr(config, 'rope_theta', None) or 10000.0)


def _target_layers(options: Options, layers: int) -> tuple[int, ...]:
    if options.target_layers is None:
        from lmdeploy.pytorch.spec_decode.dflash_utils import build_target_layer_ids
        try:
            chosen = build_target_layer_ids(layers, options.layers)
        except ValueError as error:
            raise ValueError(f'--target-layers must be given: --layers {options.layers} of the {layers} layers of the '
                             f'target cannot be spread evenly ({error})') from error
    else:
        chosen = options.target_layers
    # transformers gives the last layer's output after the final norm, engines give it before.
    if chosen[-1] > layers - 2:
        raise ValueError(f'--target-layers is {",".join(map(str, chosen))}; each must be at most {layers - 2}, the '
                         'last layer but one of the target')
    return tuple(chosen)


def _stop_ids(of_generation: int | Sequence[int] | None, text: Any, tokenizer: Any) -> tuple[int, ...]:
    for ids in (of_generation, getattr(text, 'eos_token_id', None), tokenizer.eos_token_id):
        if ids is not None:
            return (ids, ) if isinstance(ids, int) else tuple(ids)
    raise ValueError('TARGET has no eos_token_id in generation_config.json, config.json or its tokenizer; it must have '
                     'one: answers end with it')


def _unused_token(tokenizer: Any, vocabulary: int, stop_ids: Sequence[int]) -> int:
    """A token that no text has: the tokenizer's own mask, an embedding without a token, or a reserved special token."""
    taken = {*stop_ids, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    known = tokenizer.get_vocab()
    unnamed = sorted(set(range(vocabulary)) - set(known.values())) if len(known) < vocabulary else []
    special = [index for index, token in sorted(tokenizer.added_tokens_decoder.items())
               if _RESERVED.search(str(token)) and index < vocabulary]
    for candidate in (tokenizer.mask_token_id, *unnamed, *special):
        if candidate is not None and candidate not in taken:
            return candidate
    raise ValueError('--mask-token is not given, and the target has no mask token, no embedding without a token and no '
                     'reserved or unused special token; it must be the id of a token that never occurs in text')
