"""Streams of an engine that end, are cancelled or are left, and what they leave behind."""
import asyncio
import contextlib
import itertools

import pytest

GPU = pytest.mark.gpu
STOPS = [0, 2]
LENGTH, PAGE = 32, 64
EXACT = {'focus_deterministic': True, 'max_prefill_token_num': 1024}
# every position is decided in the step that it enters: each step commits the block of the step before
AT_ONCE = {'focus_policy': 'never', 'dllm_confidence_threshold': 1e-9}

sessions = itertools.count(10**6)
to_abort = {}  # session -> its engine, and how many blocks end before it is aborted


def config(limit, **options):
    """Greedy, and ends at the model's stop tokens unless told otherwise."""
    from lmdeploy import GenerationConfig
    return GenerationConfig(**{'max_new_tokens': limit, 'top_k': 1, 'temperature': 1.0, 'stop_token_ids': STOPS,
                               **options})


async def answer(engine, ids, options, abort=None):
    """One stream: its tokens, and how it ended.

    Args:
        engine: of LMDeploy.
        ids: the prompt.
        options: a generation config.
        abort: None, or (how, after how many outputs): 'cancel' as a server does, 'leave' as a client that is gone,
            'fused' between a block and the report of its commit, of just so many (see the fixture `stopped_at`).
    """
    from lmdeploy.messages import ResponseType
    instance, session, tokens, seen = engine.create_instance(), next(sessions), [], 0
    cancel = None
    if abort is not None and abort[0] == 'fused':
        to_abort[session] = engine, abort[1]
    if abort == ('cancel', 0):
        async def soon():
            while engine.scheduler.get_session(session) is None:  # before that there is nothing to cancel
                await asyncio.sleep(0)
            await instance.async_cancel(session)

        cancel = asyncio.create_task(soon())
    status = None
    async with contextlib.aclosing(instance.async_stream_infer(session, ids, options)) as outputs:
        async for output in outputs:
            tokens += output.token_ids or []
            status, seen = output.status, seen + 1
            if abort is None or status is not ResponseType.SUCCESS or seen != abort[1]:
                continue
            if abort[0] == 'leave':
                break
            if abort[0] == 'cancel':
                await instance.async_cancel(session)
    if cancel is not None:
        await cancel
    return tokens, status


def run(pipe, requests, aborts=None):
    """(tokens, status) of requests (ids, config) at once; `aborts` as in :func:`answer`, one each."""
    engine = pipe.async_engine.engine

    async def everything():
        return await asyncio.gather(*[answer(engine, ids, options, abort) for (ids, options), abort
                                      in zip(requests, aborts or [None] * len(requests), strict=True)])

    return pipe._run(coro=everything()).result()


def tokens_of(pipe, requests):
    """Tokens of requests that end as they should."""
    from lmdeploy.messages import ResponseType
    done = run(pipe, requests)
    assert all(status is ResponseType.FINISH for _, status in done)
    return [tokens for tokens, _ in done]


def left(pipe):
    """What requests hold of an engine: pages, sessions, sequences that run or wait."""
    scheduler = pipe.async_engine.engine.scheduler
    manager = scheduler.block_manager
    pages = manager.num_gpu_blocks - manager.get_num_free_gpu_blocks()
    return pages, len(scheduler.sessions), scheduler.num_running(), scheduler.num_waiting(), scheduler.num_ready()
