"""The demo models for the tests of `eval.demo_models`, which is not installed: it is imported from the repository."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    """The matrices are so small that two threads mostly wait for each other, on busy machines most of all."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='session')
def demo_folder() -> Path:
    return ROOT / 'eval' / 'demo_models'


@pytest.fixture(scope='session')
def tokenizer(demo_folder):
    from eval.demo_models.tokenizer import load_tokenizer
    return load_tokenizer(demo_folder / 'sdar')


@pytest.fixture(scope='session')
def sdar(demo_folder):
    from eval.demo_models.checkpoint import load_decoder
    return load_decoder(demo_folder / 'sdar')


@pytest.fixture(scope='session')
def prompts(tokenizer):
    """A question of each task, and one cut to each awkward length: one token, around a block's end, exactly full."""
    from eval.demo_models.tasks import eval_set
    from eval.demo_models.tokenizer import encode_prompts
    whole = encode_prompts(tokenizer, [item.prompt for item in eval_set(None, 1)])
    longest = max(whole, key=len)
    return [*whole, longest[:1], longest[:31], longest[:32], longest[:33]]
