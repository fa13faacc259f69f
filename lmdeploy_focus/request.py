"""What a request may ask for with focus or DFlash on; anything else is refused, never answered wrongly.

It may ask for an alpha and a confidence threshold of its own: in the body of the server's requests, or as fields of a
`FocusGenerationConfig`.
"""
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lmdeploy.messages import GenerationConfig

from .config import OPTION, FocusEngineConfig
from .stages.view import STOP_WORDS

# Parameter of a request -> the engine's option that it stands in for.
KNOBS = {'focus_alpha': OPTION['focus_alpha'], 'confidence_threshold': OPTION['dllm_confidence_threshold']}
# What the body of the running HTTP request says of them, unchecked; None outside of one. LMDeploy's request models drop
# what they do not know, and a body's way to its generation configs is all LMDeploy's; but whatever is done for an HTTP
# request, its choices and prompts included, runs in its context.
_ASKED: ContextVar[dict[str, Any] | None] = ContextVar('focus_asked', default=None)

_UNSUPPORTED = {
    'logprobs': 'log probabilities: a block is denoised in any order, and LMDeploy reports them per step',
    'response_format': 'grammars: they read from left to right, a block does not',
    'output_logits': 'logits of the output',
    'output_last_hidden_state': 'hidden states of the output',
    'return_routed_experts': 'routed experts',
}

_UNSUPPORTED_WITH_DFLASH = {
    'logits_processors': 'custom logits processors: they would have to see every drafted position',
    'repetition_ngram_size': 'stop at repeated n-grams: they would have to be looked for at every drafted position',
    'output_logits': 'logits of the output',
    'output_last_hidden_state': 'hidden states of the output',
    'return_routed_experts': 'routed experts',
}


@dataclass
class FocusGenerationConfig(GenerationConfig):
    """LMDeploy's generation config with a request's own options of FOCUS; None is the engine's own.

    Attributes:
        focus_alpha: a finite number >= 1.
        confidence_threshold: above 0 and at most 1.

    Raises:
        ValueError: one of them is outside its bounds; the message has its name, the value and the bound.
    """
    focus_alpha: float | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Hold both to their bounds, as they are now.

        Raises:
            ValueError: see the class.
        """
        for name, option in KNOBS.items():
            value = getattr(self, name)
            try:
                if value is not None:
                    setattr(self, name, option.check(value))
            except ValueError:
                raise ValueError(f'{name}={value!r} is not possible: it must be {option.bound}.') from None


async def read_knobs(request: Any) -> None:
    """Note what the JSON body of an HTTP request asks of FOCUS, for :func:`with_knobs` later in its context.

    Args:
        request: FastAPI's, which keeps the body for whoever reads it next.
    """
    try:
        body = await request.json()
    except ValueError:  # LMDeploy's to complain about
        body = None
    _ASKED.set({name: body[name] for name in KNOBS if name in body} if isinstance(body, dict) else None)


def with_knobs(gen_config: GenerationConfig, config: Any) -> GenerationConfig:
    """A request's generation config with what its HTTP body asks of FOCUS.

    Args:
        gen_config: of the pipeline's caller or of LMDeploy's server.
        config: of the engine.

    Returns:
        `gen_config` itself where the request has no options of its own.

    Raises:
        RequestError: an option is outside its bounds or without effect on this engine (HTTP 400); the message has its
            name and its value, and the bound or why.
    """
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    asked = {name: value for name, value in (_ASKED.get() or {}).items() if value is not None}
    try:
        if asked:
            gen_config = FocusGenerationConfig(**{**vars(gen_config), **asked})
        elif isinstance(gen_config, FocusGenerationConfig):
            gen_config.check()
        else:
            return gen_config
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None
    for name in KNOBS:
        value, why = getattr(gen_config, name), _without_effect(name, config)
        if value is not None and why:
            raise RequestError(ErrorCode.UNSUPPORTED_FEATURE, f'{name}={value!r} is not supported: {why}.')
    return gen_config


def _without_effect(name: str, config: Any) -> str | None:
    """Why an engine would not look at a request's option; None if it would."""
    if not (isinstance(config, FocusEngineConfig) and config.focus):
        return f'it needs an engine with {OPTION["focus"].flag}'
    if name == 'confidence_threshold':
        stands_in_the_way = [('dllm_unmasking_strategy', config.dllm_unmasking_strategy != 'low_confidence_dynamic')]
    else:
        stands_in_the_way = [('focus_policy', config.focus_policy == 'never'),
                             ('focus_keep', config.focus_keep is not None)]
    for field, there in stands_in_the_way:
        if there:
            return f'it has no effect on an engine with {OPTION[field].flag} {getattr(config, field)}'
    return None


def refuse_unsupported_with_dflash(gen_config: Any) -> None:
    """Check a request's generation config for an engine with DFlash.

    Raises:
        RequestError: of kind UNSUPPORTED_FEATURE (HTTP 400), naming the parameter and its value.
    """
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    for name, what in _UNSUPPORTED_WITH_DFLASH.items():
        value = getattr(gen_config, name)
        if value:
            raise RequestError(ErrorCode.UNSUPPORTED_FEATURE,
                               f'{name}={value!r} is not supported with DFlash, which has no {what}.')


def refuse_unsupported(gen_config: Any) -> None:
    """Check a request's generation config.

    Raises:
        RequestError: of kind UNSUPPORTED_FEATURE (HTTP 400), naming the parameter and its value.
    """
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    if gen_config.max_new_tokens == 0:
        return  # scoring a prompt decodes nothing
    words = gen_config.stop_token_ids or []
    if len(words) > STOP_WORDS:
        raise RequestError(ErrorCode.UNSUPPORTED_FEATURE,
                           f'stop_token_ids of {len(words)} tokens is not supported with focus: at most {STOP_WORDS}.')
    for name, what in _UNSUPPORTED.items():
        value = getattr(gen_config, name)
        if value:
            raise RequestError(ErrorCode.UNSUPPORTED_FEATURE,
                               f'{name}={value!r} is not supported with focus, which has no {what}.')
