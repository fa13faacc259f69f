"""`usage.completion_tokens_details` of the server's answers: accepted and rejected prediction tokens, OpenAI's names.

LMDeploy has the fields and leaves them empty. Its endpoints put the usage together from token counts in several places,
so it is completed where an answer leaves its endpoint; an answer of several choices or prompts has their sum.
"""
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from lmdeploy.serve.openai.protocol import CompletionTokensDetails

from .acceptance import Acceptance
from .responses import COLLECTED

# The chunk of a stream that has the usage has no choices; inside a text the quotes would be escaped.
_NO_CHOICES = ('"choices":[]', '"choices": []')


class UsageRouter:
    """Stands for a FastAPI router while LMDeploy registers an endpoint, and completes the usage in its answers."""

    def __init__(self, router: Any) -> None:
        self._router = router

    def post(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """The router's decorator; LMDeploy's own calls of the endpoint, one for each choice, stay as they are."""
        register = self._router.post(*args, **kwargs)

        def decorate(endpoint: Any) -> Any:
            register(with_usage(endpoint))
            return endpoint

        return decorate


def with_usage(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """An endpoint that answers with a dict, a stream of events or an error, with the usage of the former two
    completed."""

    @functools.wraps(endpoint)
    async def completed(*args: Any, **kwargs: Any) -> Any:
        collected: dict[int, Acceptance] = {}
        token = COLLECTED.set(collected)
        try:
            answer = await endpoint(*args, **kwargs)
        finally:
            COLLECTED.reset(token)
        if isinstance(answer, dict):
            _complete(answer['usage'], collected, exclude_none=False)
        elif isinstance(answer, StreamingResponse):
            answer.body_iterator = _events(answer.body_iterator, collected)
        return answer

    # FastAPI would look the names of the annotations up here.
    completed.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
    return completed


async def _events(events: Any, collected: dict[int, Acceptance]) -> AsyncIterator[str]:
    # The engine is driven from here, not from the endpoint. There is nothing to reset: the task that sends an answer
    # ends with it.
    COLLECTED.set(collected)
    async with aclosing(events) as inner:
        async for event in inner:
            yield _with_details(event, collected) if any(mark in event for mark in _NO_CHOICES) else event


def _with_details(event: str, collected: dict[int, Acceptance]) -> str:
    payload = json.loads(event.removeprefix('data: '))
    if payload.get('choices') == [] and payload.get('usage'):
        _complete(payload['usage'], collected, exclude_none=True)
        return f'data: {json.dumps(payload)}\n\n'
    return event


def _complete(usage: dict[str, Any], collected: dict[int, Acceptance], exclude_none: bool) -> None:
    details = CompletionTokensDetails(**usage.get('completion_tokens_details') or {})
    details.accepted_prediction_tokens = sum(one.accepted_tokens for one in collected.values())
    details.rejected_prediction_tokens = sum(one.rejected_tokens for one in collected.values())
    usage['completion_tokens_details'] = details.model_dump(exclude_none=exclude_none)
