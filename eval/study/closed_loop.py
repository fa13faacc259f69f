"""A closed loop on an engine in this process: `batch` streams, each of which sends its next request when one ends."""
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .workload import Request

Snapshot = Callable[[], dict[str, float]]

GREEDY: dict[str, Any] = {'top_k': 1, 'temperature': 1.0}
SAMPLED: dict[str, Any] = {'do_sample': True, 'top_k': 40, 'top_p': 0.9, 'min_p': 0.02, 'temperature': 0.8}


@dataclass
class Stop:
    """When a loop ends: after this many requests, or this many seconds after steady state began, what comes first."""
    requests: int | None
    seconds: float | None


@dataclass
class Run:
    """What happened. Times in seconds of `time.perf_counter`.

    Attributes:
        start: when the loop began.
        steady: when every stream had its first tokens.
        no_more: when the first stream found no next request.
        end: when all requests were done or given up.
        at: counters at `start`, `steady`, `no_more` and `end`.
        events: (time, tokens) of every output.
        first: seconds to the first tokens of each request.
        gaps: (seconds, tokens) of every later output: the time since the one before.
    """
    start: float
    steady: float = 0.0
    no_more: float = 0.0
    end: float = 0.0
    at: dict[str, dict[str, float]] = field(default_factory=dict)
    events: list[tuple[float, int]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)


class ClosedLoop:
    """One run. `on_steady` is called once, when steady state begins."""

    def __init__(self, engine: Any, batch: int, source: Iterator[Request], stop: Stop, snapshot: Snapshot,
                 sessions: Iterator[int], on_steady: Callable[[], None] | None = None, sampled: bool = False):
        self.engine, self.batch, self.source, self.stop = engine, batch, source, stop
        self.snapshot, self.sessions, self.on_steady = snapshot, sessions, on_steady
        self.sampling = SAMPLED if sampled else GREEDY
        self.waiting = batch  # streams without a token so far
        self.sent = 0
        self.over = False

    async def __call__(self) -> Run:
        """Run to the end."""
        self.result = Run(time.perf_counter())
        self.result.at['start'] = self.snapshot()
        await asyncio.gather(*[self._stream(stream) for stream in range(self.batch)])
        self.result.end = time.perf_counter()
        self.result.at['end'] = self.snapshot()
        return self.result

    def finish(self) -> None:
        """No stream gets another request, and those that run are given up."""
        self._no_more()
        self.over = True

    async def _stream(self, number: int) -> None:
        instance = self.engine.create_instance()
        first = True
        while (request := self._next()) is not None:
            if first and self.stop.seconds is not None:
                # as if the loop had begun long ago: streams do not end together
                share = random.Random(number).uniform(0.1, 1.0)
                request = Request(request.prompt, max(1, round(request.answer * share)))
            await self._one(instance, request, first)
            first = False

    def _next(self) -> Request | None:
        limit = self.stop.requests
        if self.over or (limit is not None and self.sent >= limit):
            self._no_more()
            return None
        self.sent += 1
        return next(self.source)

    def _no_more(self) -> None:
        if 'no_more' not in self.result.at:
            self.result.no_more, self.result.at['no_more'] = time.perf_counter(), self.snapshot()

    async def _one(self, instance: Any, request: Request, first: bool) -> None:
        from lmdeploy.messages import GenerationConfig
        config = GenerationConfig(max_new_tokens=request.answer, ignore_eos=True, **self.sampling)
        session = next(self.sessions)
        async with contextlib.aclosing(instance.async_stream_infer(session, request.prompt, config)) as outputs:
            await self._consume(outputs, instance, session, request, first)

    async def _consume(self, outputs: Any, instance: Any, session: int, request: Request, first: bool) -> None:
        from lmdeploy.messages import ResponseType
        result, before, start = self.result, None, time.perf_counter()
        async for output in outputs:
            if output.status not in (ResponseType.SUCCESS, ResponseType.FINISH, ResponseType.CANCEL):
                raise RuntimeError(f'the engine answered {output.status} to a request of {len(request.prompt)} tokens')
            now, count = time.perf_counter(), len(output.token_ids or ())
            if count:
                result.events.append((now, count))
                if before is None:
                    result.first.append(now - start)
                    self._arrived(first)
                else:
                    result.gaps.append((now - before, count))
                before = now
            if not self.over and self.stop.seconds is not None and result.steady \
                    and now - result.steady >= self.stop.seconds:
                self.finish()
            if self.over and output.status is ResponseType.SUCCESS:
                await instance.async_cancel(session)
                break

    def _arrived(self, first: bool) -> None:
        if first:
            self.waiting -= 1
            if self.waiting == 0:
                self.result.steady, self.result.at['steady'] = time.perf_counter(), self.snapshot()
                if self.on_steady is not None:
                    self.on_steady()


def figures(run: Run, batch: int) -> dict[str, float | None]:
    """A run's figures; those of steady state lie between `steady` and `no_more`, and are None where that is empty.

    `tokens_per_s` counts tokens when their block is handed out, `decoded_per_s` when a step decodes them, those of a
    last block that lie beyond the answer's length too.
    """
    counted, window = counts(run)
    tokens = sum(count for _, count in run.events)
    inside = sum(count for at, count in run.events if run.steady < at <= run.no_more)
    per_token = sorted((seconds / count, count) for seconds, count in run.gaps)
    result: dict[str, float | None] = {
        'batch': batch, 'requests': len(run.first), 'tokens': tokens, 'seconds': run.end - run.start,
        'tokens_per_s_whole': tokens / (run.end - run.start),
        'steady_seconds': window, 'tokens_per_s': inside / window if window else None,
        'decoded_per_s': counted['decoded_tokens'] / window if window else None,
        'ms_per_step': 1e3 * window / counted['forwards'] if window and counted['forwards'] else None,
        'forwards': counted['forwards'], 'prefills': counted['prefills'],
        'tokens_per_step': _quotient(counted['decoded_tokens'], counted['steps']),
        'rows_per_token': _quotient(counted['suffix_rows'], counted['decoded_tokens']),
        'prefix_rows_per_token': _quotient(counted['prefix_rows'], counted['decoded_tokens']),
        'rows_per_forward': _quotient(counted['suffix_rows'], counted['forwards']),
        'ttft_ms_p50': 1e3 * statistics.median(run.first), 'ttft_ms_p99': 1e3 * _weighted(
            [(value, 1) for value in sorted(run.first)], 0.99),
        'itl_ms_p50': 1e3 * _weighted(per_token, 0.5) if per_token else None,
        'itl_ms_p99': 1e3 * _weighted(per_token, 0.99) if per_token else None,
        'joules_per_token': counted['joules'] / inside if window and inside and 'joules' in counted else None,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


def counts(run: Run) -> tuple[dict[str, float], float | None]:
    """What the counters gained in steady state, and its seconds; or in the whole run, and None, where that is empty."""
    steady = _difference(run.at.get('no_more', {}), run.at.get('steady', {}))
    if steady and run.no_more > run.steady:
        return steady, run.no_more - run.steady
    return _difference(run.at['end'], run.at['start']), None


def _difference(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    return {name: value - earlier[name] for name, value in later.items() if name in earlier}


def _quotient(above: float, below: float) -> float | None:
    return above / below if below else None


def _weighted(values: list[tuple[float, int]], share: float) -> float:
    """The value below which `share` of the weight lies, of sorted (value, weight)."""
    goal = share * sum(weight for _, weight in values)
    for (value, _), reached in zip(values, itertools.accumulate(weight for _, weight in values), strict=True):
        if reached >= goal:
            return value
    return values[-1][0]
