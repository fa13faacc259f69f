"""Bad and extreme requests: a right answer or HTTP 400, and the server goes on answering."""
import http.client
import json
import time
import urllib.request

import pytest

SESSION_LEN = 512  # of the server in conftest.py


@pytest.fixture(scope='module')
def post(server):
    """Returns a function: body -> status, decoded answer."""

    def run(path='/v1/chat/completions', **body):
        connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=120)
        try:
            headers = {'Content-Type': 'application/json'}
            connection.request('POST', path, json.dumps({'model': 'demo', **body}), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return run


def _chat(text, **options):
    return {'messages': [{'role': 'user', 'content': text}], 'temperature': 0, 'max_tokens': 8, **options}


@pytest.mark.parametrize('options', [
    {'max_tokens': 0}, {'max_tokens': -1}, {'max_tokens': 'many'}, {'temperature': -1}, {'top_p': 2}, {'top_k': -5},
    {'logprobs': True, 'top_logprobs': 2}, {'response_format': {'type': 'json_object'}},
    {'response_format': {'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': {'type': 'object'}}}},
], ids=str)
def test_refused(post, still_answers, options):
    """Red when one of these is accepted and answered wrongly, ends in a 5xx, or takes the engine down."""
    status, answer = post(**_chat('hello', **options))
    assert status in (400, 422), answer


def test_huge_limit_ends_at_the_context(post, still_answers):
    """Red when a limit beyond the context overflows the cache, or never ends."""
    status, answer = post(**_chat('Write a long text.', max_tokens=10**9, ignore_eos=True))
    assert status in (200, 400), answer
    if status == 200:
        assert answer['choices'][0]['finish_reason'] == 'length'
        assert answer['usage']['total_tokens'] <= SESSION_LEN


@pytest.mark.parametrize('short', [-1, 0, 1, 2, 31, 32, 33])
def test_prompt_at_the_context_limit(post, still_answers, tokenizer, short):
    """Prompts around the context's end. Red when one that fits is refused, or one that does not is decoded."""
    word = tokenizer.encode(' word', add_special_tokens=False)
    assert len(word) == 1
    frame = len(tokenizer.apply_chat_template([{'role': 'user', 'content': ''}], add_generation_prompt=True,
                                              return_dict=False))
    prompt = ' word' * (SESSION_LEN - short - frame)
    status, answer = post(**_chat(prompt, max_tokens=64, ignore_eos=True))
    if short <= 0:
        assert status == 400, answer
    elif status == 200:
        assert answer['usage']['prompt_tokens'] == SESSION_LEN - short
        assert answer['usage']['completion_tokens'] <= short
        assert answer['choices'][0]['finish_reason'] == 'length'
    else:
        assert status == 400


@pytest.mark.parametrize('text', ['', ' ', '\x00', '<|MASK|>', 'say <|MASK|><|MASK|> twice', '<|im_end|>',
                                  '<|endoftext|>', '\u202eabc \U0001f468\u200d\U0001f469\u200d\U0001f467', 'a' * 300],
                         ids=ascii)
def test_odd_prompts(post, still_answers, text):
    """Red when one of these is a 5xx, hangs, or puts a mask token into the text (known fault U3)."""
    status, answer = post(**_chat(text, max_tokens=40))
    assert status in (200, 400), answer
    if status == 200:
        content = answer['choices'][0]['message']['content']
        assert '<|MASK|>' not in content
        assert answer['usage']['completion_tokens'] <= 40


def test_empty_conversation(post, still_answers):
    """Red when no message at all is a 5xx."""
    status, answer = post(messages=[], max_tokens=8, temperature=0)
    assert status in (200, 400, 422), answer


def _cache_in_use(server):
    with urllib.request.urlopen(f'{server.url}/metrics', timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith('lmdeploy:gpu_cache_usage_perc'))


def test_a_client_that_disconnects_frees_its_blocks(server, post, still_answers):
    """Red when an abandoned request decodes on to its limit, or leaves its pages behind."""
    for _ in range(3):
        connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
        body = {'model': 'demo', 'stream': True, **_chat('Write a long text.', max_tokens=450, ignore_eos=True)}
        connection.request('POST', '/v1/chat/completions', json.dumps(body), {'Content-Type': 'application/json'})
        answer = connection.getresponse()
        assert answer.read(64)
        connection.close()
    begin = server.counters()['steps']
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(2)
        now = server.counters()['steps']
        if now == begin and _cache_in_use(server) == 0:
            return
        begin = now
    pytest.fail(f'cache in use a minute after the clients left: {_cache_in_use(server)}')
