"""One API server of the demo model on loopback for all tests of this folder."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SESSION_LEN = 512
MODEL = ROOT / 'eval' / 'demo_models' / 'sdar'


@pytest.fixture(scope='session')
def server():
    """The server, with focus, and a context short enough that its limit is reached in a test."""
    from eval.api_server import ApiServer
    flags = ['--focus', '--device', 'cpu', '--dtype', 'float32', '--model-name', 'demo',
             '--session-len', str(SESSION_LEN), '--max-batch-size', '32']
    with ApiServer(MODEL, flags) as running:
        yield running


@pytest.fixture(scope='session')
def client(server):
    """An OpenAI client of the server."""
    from openai import OpenAI
    with OpenAI(base_url=f'{server.url}/v1', api_key='none', timeout=300, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope='session')
def ask(client):
    """Returns a function: prompt, options of the request -> the completion."""

    def run(prompt, **options):
        options = {'temperature': 0, 'max_tokens': 64, **options}
        return client.chat.completions.create(model='demo', messages=[{'role': 'user', 'content': prompt}], **options)

    return run


@pytest.fixture(scope='session')
def prompts():
    """Sixteen held-out questions, four of each judged task."""
    from eval.demo_models import tasks
    return [item.prompt for task in tasks.TASKS for item in tasks.eval_set(task, 4)]


@pytest.fixture(scope='session')
def tokenizer():
    """The demo model's tokenizer."""
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def still_answers(ask, prompts):
    """After the test, the server answers as it did before."""
    before = ask(prompts[0]).choices[0].message.content
    yield
    assert ask(prompts[0]).choices[0].message.content == before
