"""A request's `Acceptance` on its way from the engine's outputs to the responses of pipeline and server."""
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from lmdeploy.messages import Response
from lmdeploy.serve.core.async_engine import GenOut

from .acceptance import Acceptance

# Requests of one HTTP request -> what they have accepted so far; None outside of one.
COLLECTED: ContextVar[dict[int, Acceptance] | None] = ContextVar('dflash_collected', default=None)


@dataclass(repr=False)
class DFlashResponse(Response):
    """LMDeploy's response of a pipeline.

    acceptance: of the request's verifications up to this response; None where it failed before the engine had it
    """
    acceptance: Acceptance | None = None

    def extend(self, other: Response) -> 'DFlashResponse':
        """This response and then `other`, whose acceptance is the newer one."""
        super().extend(other)
        self.acceptance = getattr(other, 'acceptance', None) or self.acceptance
        return self


@dataclass
class DFlashGenOut(GenOut):
    """LMDeploy's output of `AsyncEngine.generate`, with the request's acceptance up to it."""
    acceptance: Acceptance | None = None

    def to_response(self, index: int = 0) -> DFlashResponse:
        """The pipeline's response."""
        return DFlashResponse(**vars(super().to_response(index)), acceptance=self.acceptance)


class _Observed:
    """The engine's outputs of one request, each with the acceptance since the one before, as metrics take it."""

    def __init__(self, outputs: AsyncIterator[Any], session: Any) -> None:
        self._outputs, self._session = outputs, session

    def __aiter__(self) -> '_Observed':
        return self

    async def __anext__(self) -> Any:
        output = await anext(self._outputs)
        metrics = output.req_metrics
        if metrics is not None and isinstance(metrics.spec_info, Acceptance):
            so_far, before = metrics.spec_info, self._session.acceptance
            # A copy: a request that is cancelled gets the metrics of its last output once more.
            output.req_metrics = replace(metrics, spec_info=so_far - before)
            self._session.acceptance = so_far
        return output


@asynccontextmanager
async def observed(run: Any, session: Any, draft_tokens: int) -> AsyncIterator[_Observed]:
    """LMDeploy's `safe_run` of a request, whose `session` is told the acceptance so far.

    Args:
        run: the context manager of the engine's outputs.
        session: of the request; it has one at a time.
        draft_tokens: tokens drafted in a step.
    """
    session.acceptance = Acceptance.none(draft_tokens)
    async with run as outputs:
        yield _Observed(outputs, session)


async def with_acceptance(stream: Any, request: Any, draft_tokens: int) -> AsyncIterator[DFlashGenOut]:
    """The outputs of `AsyncEngine.generate` with the acceptance of their request.

    Args:
        stream: LMDeploy's outputs.
        request: LMDeploy's preprocessed request.
        draft_tokens: tokens drafted in a step.
    """
    session = request.session
    session.acceptance = Acceptance.none(draft_tokens)
    collected = COLLECTED.get()
    async with aclosing(stream) as outs:
        async for out in outs:
            if collected is not None:
                collected[session.session_id] = session.acceptance
            yield DFlashGenOut(**vars(out), acceptance=session.acceptance)
