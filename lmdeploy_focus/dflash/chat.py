"""What `lmdeploy chat` prints of the drafter's work after an answer."""
import functools
from collections.abc import Iterator
from typing import Any

from .acceptance import Acceptance


def summary(acceptance: Acceptance) -> str:
    """One line on the drafted tokens of an answer."""
    if not acceptance.verify_steps:
        return '[no tokens drafted]'
    return (f'[acceptance length {acceptance.length:.2f}: {acceptance.accepted_tokens} of {acceptance.drafted_tokens} '
            f'drafted tokens accepted in {acceptance.verify_steps} steps]')


def reporting(pipe: Any) -> Any:
    """`pipe`, with a summary printed at the end of each stream; one that fails or is broken off has none."""
    stream_infer = pipe.stream_infer

    @functools.wraps(stream_infer)
    def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
        response = None
        for response in stream_infer(*args, **kwargs):
            yield response
        acceptance = getattr(response, 'acceptance', None)
        if acceptance is not None:
            print(f'\n{summary(acceptance)}', end='', flush=True)

    pipe.stream_infer = stream
    return pipe
