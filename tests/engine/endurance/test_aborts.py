"""Streams that are cancelled or left at any time leave nothing behind."""
import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from .streams import AT_ONCE, EXACT, GPU, LENGTH, PAGE, config, left, run, sessions, to_abort, tokens_of

# minutes on two cores; also what `-m gpu` runs
pytestmark = pytest.mark.slow


@pytest.fixture
def stopped_at(monkeypatch):
    """How many running sequences were aborted: amid a block, with a commit on its way, with it at a page's end.

    Aborts those of `to_abort` where a server would when the request to do so comes in just then.
    """
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop
    from lmdeploy.pytorch.messages import MessageStatus
    from lmdeploy.pytorch.paging.scheduler import Scheduler
    seen = Counter()
    for name in ('stop_session', 'end_session'):
        original = getattr(Scheduler, name)

        def watched(self, session_id, _original=original):
            for sequence in self.sessions[session_id].sequences.values():
                if sequence.status == MessageStatus.RUNNING:
                    fused = sequence.uncommitted > 0
                    seen['fused' if fused else 'other'] += 1
                    seen['page end'] += fused and sequence.num_history_ids % PAGE == 0
                else:
                    seen['idle'] += 1
            return _original(self, session_id)

        monkeypatch.setattr(Scheduler, name, watched)

    finish = EngineLoop._finish_forward_output

    def finish_and_abort(self, out, running, model_inputs, delta):
        finish(self, out, running, model_inputs, delta)
        for sequence in running:
            if sequence.session_id in to_abort and sequence.status == MessageStatus.RUNNING and sequence.uncommitted:
                engine, blocks = to_abort.pop(sequence.session_id)
                if blocks > 1:
                    to_abort[sequence.session_id] = engine, blocks - 1
                else:
                    engine._on_stop_session([SimpleNamespace(data={'session_id': sequence.session_id,
                                                                   'response': False}, resp=None)])

    monkeypatch.setattr(EngineLoop, '_finish_forward_output', finish_and_abort)
    to_abort.clear()
    return seen


@pytest.mark.parametrize('options', [{}, AT_ONCE], ids=['focus', 'blocks at once'])
@pytest.mark.parametrize('device, streams, prompts, limit', [('cpu', 12, 2, 70), pytest.param('cuda', 1000, 32, 200,
                                                                                              marks=GPU)])
def test_aborted_streams_leave_nothing_behind(engine, encoded, stopped_at, device, streams, prompts, limit, options):
    """Streams that are cancelled or left before they run, after their prefill or any block, and on the step that
    commits one; every fourth is not. No page, session or sequence is left, and the others' answers are what they are
    without aborts.

    Red when an abort loses a page or shifts the state of the sequences behind it, or a step that was on its way writes
    to pages which another sequence has by then.
    """
    from lmdeploy.messages import ResponseType
    pipe = engine(device, **EXACT, **options)
    before = left(pipe)
    requests = [(ids, config(limit, stop_token_ids=[])) for ids in encoded(prompts)]
    expected = tokens_of(pipe, requests)
    own = random.Random(1)
    fates = [None if number % 4 == 3 else ('fused', own.randrange(1, 3)) if number % 4 == 2
             else (own.choice(['cancel', 'leave']), own.randrange(5)) for number in range(streams)]
    fates = [('cancel', 0) if fate == ('leave', 0) else fate for fate in fates]
    stopped_at.clear()
    done = run(pipe, [requests[number % prompts] for number in range(streams)], fates)
    for number, ((tokens, status), fate) in enumerate(zip(done, fates, strict=True)):
        whole = expected[number % prompts]
        if fate is None:
            assert (tokens, status) == (whole, ResponseType.FINISH), number
        else:
            assert tokens == whole[:len(tokens)], number
    assert stopped_at['fused'] >= streams // 4 and stopped_at['page end'] > 0 and stopped_at['idle'] > 0, stopped_at
    assert not to_abort
    assert left(pipe) == before
    assert tokens_of(pipe, requests) == expected


@pytest.mark.parametrize('options', [{}, AT_ONCE], ids=['focus', 'blocks at once'])
@pytest.mark.parametrize('device, prompts', [('cpu', 2), pytest.param('cuda', 24, marks=GPU)])
def test_a_turn_after_an_abort(engine, encoded, device, prompts, options):
    """The turn after one that was cancelled on the step that commits its last block answers as if all the text were its
    prompt.

    Red when a block whose commit never ran counts as committed, or the block begun after it stays in the text.
    """
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.request import RequestType
    from lmdeploy.pytorch.messages import SamplingParam
    pipe = engine(device, **EXACT, **options, focus_commit='full')
    scheduler, limit, longest = pipe.async_engine.engine.scheduler, 40, 900 if device == 'cuda' else 400
    before, uncommitted = left(pipe), []

    async def two_turns(first, second):
        engine, session = pipe.async_engine.engine, next(sessions)
        sender = engine.create_instance().req_sender
        sender.send_async(RequestType.ADD_SESSION, {'session_id': session, 'response': False})
        tokens, ended = [], False  # an answer that is whole before its first output is read has not been aborted
        for ids, most in ((first, longest), (second, limit)):
            sampling = SamplingParam.from_gen_config(config(most, stop_token_ids=[]))
            response = sender.send_async(RequestType.ADD_MESSAGE, {'token_ids': ids, 'session_id': session,
                                                                   'sampling_param': sampling, 'adapter_name': None})
            said = []
            while True:
                response = await sender.async_recv(response, wait_main=True)
                said = response.data['token_ids'].tolist() if response.data else said
                if response.type is not ResponseType.SUCCESS:
                    break
                if most == longest and len(said) >= LENGTH:
                    sequence, = scheduler.get_session(session).sequences.values()
                    uncommitted.append(sequence.uncommitted)
                    await sender.async_send(RequestType.STOP_SESSION, {'session_id': session})
                    # what was decided up to then, which may be a block more than was handed out
                    said = sequence.all_ids[len(first):sequence.num_history_ids].tolist()
                    ended = sequence.num_valid_ids == sequence.num_history_ids
                    break
            tokens.append(said)
        await sender.async_send(RequestType.END_SESSION, {'session_id': session})
        return tokens, ended

    async def everything(pairs):
        return await asyncio.gather(*[two_turns(*pair) for pair in pairs])

    ids = encoded(2 * prompts)
    pairs = list(zip(ids[:prompts], ids[prompts:], strict=True))
    done = pipe._run(coro=everything(pairs)).result()
    assert any(uncommitted), 'the test means nothing unless a commit is on its way'
    # one that was cancelled amid a block has begun tokens in its text
    at_ends = [(pair, tokens) for pair, (tokens, ended) in zip(pairs, done, strict=True) if ended]
    assert len(at_ends) > prompts // 2
    requests = [(first + one + second, config(limit, stop_token_ids=[])) for (first, second), (one, _) in at_ends]
    assert [two for _, (_, two) in at_ends] == tokens_of(pipe, requests)
    assert left(pipe) == before
