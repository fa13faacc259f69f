"""focus_alpha and confidence_threshold in the body of a request, through a real API server and its engine process."""
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

KNOBS = {'focus_alpha': 3, 'confidence_threshold': .5}
PATHS = '/v1/chat/completions', '/v1/completions'
GREEDY = {'temperature': 0, 'max_tokens': 40}
BOUND = {'focus_alpha': 'a finite number >= 1', 'confidence_threshold': 'above 0 and at most 1'}


@pytest.fixture(scope='module')
def texts(prompts):
    """Returns a function: whether a prompt is a chat -> what an engine with KNOBS as its options answers, for the first
    four prompts."""
    from lmdeploy import GenerationConfig, pipeline

    from lmdeploy_focus import FocusEngineConfig

    from .conftest import MODEL, SESSION_LEN
    options = FocusEngineConfig(device_type='cpu', dtype='float32', max_batch_size=8, num_gpu_blocks=64,
                                session_len=SESSION_LEN, focus_alpha=3.0, dllm_confidence_threshold=.5)
    config = GenerationConfig(max_new_tokens=GREEDY['max_tokens'], do_sample=False)
    with pipeline(str(MODEL), backend_config=options, log_level='ERROR') as pipe:
        yield lambda chat: [answer.text for answer in pipe(prompts[:4], gen_config=config, do_preprocess=chat)]


@pytest.fixture(scope='module')
def post(server):
    """Returns a function: path, fields of the body as JSON text -> status, answer."""

    def run(path, fields):
        body = json.dumps({'model': 'demo', 'messages': [{'role': 'user', 'content': 'hello'}], 'prompt': 'hello',
                           **GREEDY})
        connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=120)
        try:
            connection.request('POST', path, f'{body[:-1]}, {fields}}}', {'Content-Type': 'application/json'})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return run


def test_chats(client, ask, prompts, texts):
    """With the knobs and without, whole and in pieces, one choice and two, all at once: each answers as an engine with
    these options does. Red when a body's knobs are lost on one of these ways, or reach a request without any."""
    own, default = texts(chat=True), [ask(prompt, **GREEDY).choices[0].message.content for prompt in prompts[:4]]
    assert own != default

    def stream(prompt):
        pieces = client.chat.completions.create(model='demo', messages=[{'role': 'user', 'content': prompt}],
                                                stream=True, extra_body=KNOBS, **GREEDY)
        return ''.join(piece.choices[0].delta.content or '' for piece in pieces if piece.choices)

    def whole(prompt, **options):
        return [choice.message.content for choice in ask(prompt, **{**GREEDY, **options}).choices]

    with ThreadPoolExecutor(8) as pool:
        jobs = [(pool.submit(whole, prompt, extra_body=KNOBS), pool.submit(whole, prompt),
                 pool.submit(stream, prompt), pool.submit(whole, prompt, n=2, extra_body=KNOBS),
                 pool.submit(whole, prompt, extra_body=dict.fromkeys(KNOBS)))  # null is the default
                for prompt in prompts[:4]]
        answers = [[job.result() for job in row] for row in jobs]
    assert answers == [[[a], [b], a, [a, a], [b]] for a, b in zip(own, default, strict=True)]


def test_completions(client, prompts, texts):
    """Four prompts in one request, one by one, and in pieces. Red when one of a batch's prompts loses its knobs."""
    own = texts(chat=False)
    batch = client.completions.create(model='demo', prompt=prompts[:4], extra_body=KNOBS, **GREEDY)
    assert [choice.text for choice in batch.choices] == own
    single = client.completions.create(model='demo', prompt=prompts[0], extra_body=KNOBS, **GREEDY)
    pieces = client.completions.create(model='demo', prompt=prompts[0], stream=True, extra_body=KNOBS, **GREEDY)
    assert single.choices[0].text == ''.join(piece.choices[0].text for piece in pieces if piece.choices) == own[0]
    plain = client.completions.create(model='demo', prompt=prompts[:4], **GREEDY)
    assert [choice.text for choice in plain.choices] != own


@pytest.mark.parametrize('path', PATHS)
def test_bad_values(post, still_answers, path):
    """In streams too, and in every choice. Red when one is a 200 or a 5xx, its message leaves out the parameter, the
    value or the bound, or the server stops answering."""
    bad = {'focus_alpha': ['0.5', '-1', 'NaN', 'Infinity', '1e400', '"2"', 'true', '[2]', '{}', '1' + '0' * 400],
           'confidence_threshold': ['0', '1.5', '-0.1', 'NaN', '"0.9"', 'false', '[]']}
    for name, values in bad.items():
        for value in values:
            for more in ('"n": 1', '"n": 2', '"stream": true'):
                status, answer = post(path, f'"{name}": {value}, {more}')
                message = json.loads(answer)['message']
                assert status == 400 and f'{name}={json.loads(value)!r}' in message and BOUND[name] in message, answer
    status, answer = post(path, '"focus_alpha": 1, "confidence_threshold": 1.0, "focus_alpha": null')
    assert status == 200, answer


def test_bodies_that_are_no_request(server, still_answers):
    """Red when looking for the knobs turns LMDeploy's own refusal into a 5xx."""
    for path in PATHS:
        for body in (b'', b'[1]', b'null', b'{"focus_alpha": ', b'\xff', b'"focus_alpha"'):
            connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
            connection.request('POST', path, body, {'Content-Type': 'application/json'})
            assert connection.getresponse().status == 400, body
            connection.close()


@pytest.mark.slow
def test_a_server_without_focus(prompts):
    """Red when a server without focus takes the knobs in silence, or its refusal does not say what they need."""
    from openai import BadRequestError, OpenAI

    from eval.api_server import ApiServer

    from .conftest import MODEL
    with ApiServer(MODEL, ['--device', 'cpu', '--dtype', 'float32', '--model-name', 'demo']) as running, \
            OpenAI(base_url=f'{running.url}/v1', api_key='none', timeout=300, max_retries=0) as client:
        for name, value in KNOBS.items():
            with pytest.raises(BadRequestError, match=f'{name}={float(value)} is not supported.*--focus'):
                client.completions.create(model='demo', prompt=prompts[0], extra_body={name: value}, **GREEDY)
        empty = client.completions.create(model='demo', prompt=prompts[0], extra_body=dict.fromkeys(KNOBS), **GREEDY)
        assert empty.choices[0].text
