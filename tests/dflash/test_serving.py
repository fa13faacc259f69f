"""The API server with a drafter, as a user starts it."""
import json
import urllib.request

import pytest


@pytest.fixture(scope='module')
def server(demo):
    from eval.api_server import ApiServer
    flags = ['--dflash', str(demo / 'dflash'), '--device', 'cpu', '--dtype', 'float32', '--model-name', 'demo',
             '--session-len', '512', '--max-batch-size', '8']
    with ApiServer(demo / 'ar', flags) as running:
        yield running


@pytest.fixture(scope='module')
def client(server):
    from openai import OpenAI
    with OpenAI(base_url=f'{server.url}/v1', api_key='none', timeout=300, max_retries=0) as opened:
        yield opened


def figures(server):
    """The server's metrics without labels by name."""
    with urllib.request.urlopen(f'{server.url}/metrics/', timeout=60) as answered:
        lines = [line for line in answered.read().decode().splitlines() if not line.startswith('#')]
    return {line.partition('{')[0].partition(' ')[0]: float(line.rpartition(' ')[2]) for line in lines}


def test_answers_grammars_refusals_and_metrics(server, client):
    """Red when the server does not draft, LMDeploy's own figures of speculation are not filled, ours are not exported,
    a grammar is broken, or what cannot be answered rightly is answered."""
    from openai import BadRequestError
    messages = [{'role': 'user', 'content': 'Tom has 3 apples and buys 5 more. How many apples does he have?'}]
    answered = client.chat.completions.create(model='demo', messages=messages, temperature=0, max_tokens=64)
    assert '8' in answered.choices[0].message.content
    schema = {'type': 'object', 'properties': {'ok': {'type': 'boolean'}}, 'required': ['ok'],
              'additionalProperties': False}
    grammar = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}
    formatted = client.chat.completions.create(model='demo', messages=messages, temperature=0, max_tokens=64,
                                               response_format=grammar, logit_bias=None)
    assert formatted.choices[0].message.content.lstrip().startswith('{')
    if formatted.choices[0].finish_reason == 'stop':
        assert set(json.loads(formatted.choices[0].message.content)) == {'ok'}
    with pytest.raises(BadRequestError, match='repetition_ngram_size=3 is not supported with DFlash'):
        client.chat.completions.create(model='demo', messages=messages,
                                       extra_body={'repetition_ngram_size': 3, 'repetition_ngram_threshold': 2})
    seen = figures(server)
    drafted = seen['lmdeploy_focus:drafted_tokens_total']
    assert drafted == 15 * seen['lmdeploy_focus:verify_steps_total'] > 0
    assert 0 < seen['lmdeploy_focus:accepted_tokens_total'] < drafted
    assert seen['lmdeploy:spec_decode_num_draft_tokens_total'] > 0
    assert seen['lmdeploy:spec_decode_num_accepted_tokens_total'] > 0
