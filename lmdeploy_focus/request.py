"""What a request may ask for with focus or DFlash on; anything else is refused, never answered wrongly."""
from typing import Any

from .stages.view import STOP_WORDS

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
