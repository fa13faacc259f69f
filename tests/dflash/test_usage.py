"""What the usage of the server's answers and its metrics tell of drafted tokens."""
import asyncio
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from lmdeploy import GenerationConfig
from lmdeploy.messages import RequestMetrics

from lmdeploy_focus import run_stats
from lmdeploy_focus.dflash.acceptance import Acceptance

from .records import GREEDY, QUESTION, delta


@pytest.fixture(scope='module')
def api(pipes):
    """Returns a function: LMDeploy's endpoints before a pipeline's engine, path, fields of the body -> the answer, or
    the events of a stream."""
    import uvicorn
    from fastapi import FastAPI
    from lmdeploy.serve.openai import api_server

    from eval.api_server import free_port
    running, ports = [], {}

    def port_of(pipe):
        if id(pipe) not in ports:
            context = api_server.ServerContext()
            context.async_engine = pipe.async_engine
            api_server.set_parsers(context, None, None)
            app = FastAPI()
            app.include_router(api_server.create_openai_router(context))
            ports[id(pipe)] = free_port()
            server = uvicorn.Server(uvicorn.Config(app, port=ports[id(pipe)], log_level='error', lifespan='off'))
            served = asyncio.run_coroutine_threadsafe(server._serve(), pipe.internal_thread.loop)
            running.append((server, served))
            while not server.started:
                assert not served.done()
                time.sleep(0.02)
        return ports[id(pipe)]

    def post(pipe, path, **body):
        if body.get('stream'):
            body['stream_options'] = {'include_usage': True}
        request = urllib.request.Request(f'http://127.0.0.1:{port_of(pipe)}{path}',
                                         json.dumps({'model': pipe.async_engine.model_name, **body}).encode(),
                                         {'Content-Type': 'application/json'})
        with urllib.request.urlopen(request, timeout=120) as answered:
            text = answered.read().decode()
        if not body.get('stream'):
            return json.loads(text)
        events = [line.removeprefix('data: ') for line in text.splitlines() if line]
        assert events.pop() == '[DONE]'
        return [json.loads(event) for event in events]

    yield post
    for server, served in running:
        server.should_exit = True
        served.result(30)


def predicted(usage):
    """Accepted and rejected tokens of a usage."""
    details = usage['completion_tokens_details']
    return details['accepted_prediction_tokens'], details['rejected_prediction_tokens']


CHAT = '/v1/chat/completions', {'messages': [{'role': 'user', 'content': QUESTION}], 'temperature': 0, 'max_tokens': 48}
REQUESTS = {
    'chat': CHAT,
    'cap': (CHAT[0], {**CHAT[1], 'max_tokens': 7}),
    'stop word': (CHAT[0], {**CHAT[1], 'stop': ['apples']}),
    'one token': (CHAT[0], {**CHAT[1], 'max_tokens': 1}),
    'three choices': (CHAT[0], {**CHAT[1], 'temperature': 1.0, 'seed': 3, 'n': 3}),
    'completion': ('/v1/completions', {'temperature': 0, 'max_tokens': 48}),
}


@pytest.mark.parametrize('name', REQUESTS)
def test_usage_of_an_answer_and_of_its_stream(name, pipes, prompts, api, records):
    """Red when the fields are missing, are of one choice or prompt only, or differ between an answer and its stream;
    when another field of the usage changes; or when an event of a stream but that of the usage has one."""
    plain, pipe = pipes()
    path, body = REQUESTS[name]
    if name == 'completion':
        body = {**body, 'prompt': prompts[:2]}
    answer = api(pipe, path, **body)
    accepted, rejected = predicted(answer['usage'])
    assert (accepted, rejected) == records.total()
    assert (accepted + rejected) % 15 == 0
    assert (accepted > 0) is (name != 'one token')
    *events, last = api(pipe, path, **body, stream=True)
    assert predicted(last['usage']) == (accepted, rejected)
    assert not any(event['usage'] for event in events)
    counted = 'prompt_tokens', 'total_tokens', 'completion_tokens'
    assert [last['usage'][key] for key in counted] == [answer['usage'][key] for key in counted]
    if name != 'three choices':  # their seeds are the same, but not what they cost a test
        of_plain = api(plain, path, **body)
        assert of_plain['usage'].pop('completion_tokens_details') is None
        del answer['usage']['completion_tokens_details']
        assert (of_plain['usage'], of_plain['choices']) == (answer['usage'], answer['choices'])
        *_, last = api(plain, path, **body, stream=True)
        assert 'completion_tokens_details' not in last['usage']


def test_requests_at_once(pipes, prompts, api):
    """Red when a request is told of another's tokens, or one is told twice."""
    _, pipe = pipes()
    bodies = [{'prompt': text, 'temperature': 0, 'max_tokens': 16 + 8 * (place % 4), 'stream': place % 3 == 0}
              for place, text in enumerate(prompts[:12])]

    def ask(body):
        answer = api(pipe, '/v1/completions', **body)
        return predicted(answer[-1]['usage'] if body['stream'] else answer['usage'])

    alone, before = [ask(body) for body in bodies], run_stats(pipe)
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(ask, bodies)) == alone
    stats = delta(pipe, before)
    assert sum(accepted for accepted, _ in alone) == stats['accepted_tokens']
    assert sum(map(sum, alone)) == stats['drafted_tokens']


def test_an_engine_without_a_drafter_has_the_endpoints_and_outputs_of_lmdeploy(pipes, prompts):
    """Red when a row does anything for an engine without `DFlashConfig`."""
    from lmdeploy.messages import Response
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop
    from lmdeploy.serve.openai import chat_completions
    from lmdeploy.serve.openai.endpoints import completions
    plain, dflash = pipes()
    out = plain(prompts[:1], gen_config=GenerationConfig(max_new_tokens=2), do_preprocess=False)[0]
    assert type(out) is Response
    assert type(plain.async_engine.engine._engine_loop) is EngineLoop
    for pipe, wrapped in ((plain, False), (dflash, True)):
        for module in (chat_completions, completions):
            given = []
            router = SimpleNamespace(post=lambda *args, given=given, **kwargs: given.append)
            module.register(router, SimpleNamespace(async_engine=pipe.async_engine))
            assert [hasattr(endpoint, '__wrapped__') for endpoint in given] == [wrapped]


def test_metrics_of_an_output_with_several_steps():
    """Red when such an output counts as one step, or a position's count is that of another; and when LMDeploy's own
    kind of output is no longer taken."""
    from lmdeploy.metrics.stats import SpeculativeDecodingStats
    stats = SpeculativeDecodingStats(3)
    stats.update_from_output(SimpleNamespace(req_metrics=RequestMetrics(spec_info=Acceptance((1, 0, 2, 1)))))
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 12, 7)
    assert stats.num_accepted_tokens_per_pos.tolist() == [3, 3, 1]
    stats.update_from_output(SimpleNamespace(req_metrics=RequestMetrics(
        spec_info={'num_draft_tokens': 3, 'num_accepted_tokens': 1})))
    stats.update_from_output(SimpleNamespace(req_metrics=None))
    assert (stats.num_drafts, stats.num_accepted_tokens_per_pos.tolist()) == (5, [4, 3, 1])


def test_metrics_of_requests(pipes, prompts, monkeypatch):
    """Red when LMDeploy's metrics get the sum of a request with each of its outputs, tokens after a stop or a cap, or
    not every step; the outputs of half the steps are not fetched in time here."""
    from lmdeploy.metrics.metrics_processor import metrics_processor
    from lmdeploy.pytorch.engine.engine_instance import EngineInstance
    _, pipe = pipes()
    fed, sent = [], EngineInstance.async_stream_infer

    async def slow(self, *args, **kwargs):
        async for output in sent(self, *args, **kwargs):
            yield output
            await asyncio.sleep(0.05)

    monkeypatch.setattr(EngineInstance, 'async_stream_infer', slow)
    monkeypatch.setattr(metrics_processor, 'queue_update', fed.append)
    before = run_stats(pipe)
    outs = pipe(prompts[:6], gen_config=GenerationConfig(**{**GREEDY, 'max_new_tokens': 30}), do_preprocess=False)
    counted = None
    for outputs, _, _, stats in fed:
        stats.update_from_output(outputs)
        counted = stats if counted is None else counted
        if counted is not stats:
            counted.num_drafts += stats.num_drafts
            counted.num_draft_tokens += stats.num_draft_tokens
            counted.num_accepted_tokens += stats.num_accepted_tokens
            counted.num_accepted_tokens_per_pos += stats.num_accepted_tokens_per_pos
    stats = delta(pipe, before)
    assert len(fed) < stats['verify_steps']
    assert (counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens) == \
        (stats['verify_steps'], stats['drafted_tokens'], stats['accepted_tokens'])
    places = [out.acceptance.accepted_per_position for out in outs]
    assert counted.num_accepted_tokens_per_pos.tolist() == [sum(column) for column in zip(*places, strict=True)]


def figures(server):
    """The server's series by name, and by name and position."""
    with urllib.request.urlopen(f'{server.url}/metrics/', timeout=60) as answered:
        lines = [line for line in answered.read().decode().splitlines() if not line.startswith('#')]
    seen = {}
    for line in lines:
        name, _, labels = line.partition(' ')[0].partition('{')
        position = labels.partition('position="')[2].partition('"')[0]
        seen[(name, int(position)) if position else name] = float(line.rpartition(' ')[2])
    return seen


@pytest.mark.slow
def test_a_server(demo, prompts):
    """The command, its engine process and its metrics, with 40 requests at once. Red as those above, and when the
    outputs that are put together on the way between the processes lose counts."""
    from openai import OpenAI

    from eval.api_server import ApiServer
    flags = ['--dflash', str(demo / 'dflash'), '--device', 'cpu', '--dtype', 'float32', '--model-name', 'demo',
             '--session-len', '512', '--max-batch-size', '8']
    with ApiServer(demo / 'ar', flags) as server, \
            OpenAI(base_url=f'{server.url}/v1', api_key='none', timeout=300, max_retries=0) as client:

        def ask(place):
            options = {'model': 'demo', 'temperature': 0, 'max_tokens': 16 + place, 'prompt': prompts[place % 32]}
            if place % 2:
                *_, answer = client.completions.create(**options, stream=True, stream_options={'include_usage': True})
            else:
                answer = client.completions.create(**options)
            details = answer.usage.completion_tokens_details
            return details.accepted_prediction_tokens, details.rejected_prediction_tokens

        alone = [ask(place) for place in range(40)]
        with ThreadPoolExecutor(40) as pool:
            assert list(pool.map(ask, range(40))) == alone
        accepted, drafted = 2 * sum(one for one, _ in alone), 2 * sum(map(sum, alone))
        deadline = time.monotonic() + 20
        while (seen := figures(server))['lmdeploy:spec_decode_num_draft_tokens_total'] < drafted:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for name, value in (('drafts', drafted / 15), ('draft_tokens', drafted), ('accepted_tokens', accepted)):
        assert seen[f'lmdeploy:spec_decode_num_{name}_total'] == value
    assert seen['lmdeploy_focus:verify_steps_total'] == drafted / 15
    assert seen['lmdeploy_focus:drafted_tokens_total'] == drafted
    assert seen['lmdeploy_focus:accepted_tokens_total'] == accepted
    places = [seen['lmdeploy:spec_decode_num_accepted_tokens_per_pos_total', place] for place in range(15)]
    assert places == sorted(places, reverse=True)
    assert sum(places) == accepted
