"""Engines and prompts of the endurance tests, small on a CPU."""
import random

import pytest


@pytest.fixture(autouse=True)
def narrow(request, monkeypatch):
    """Deterministic products in chunks that suit a CPU's few rows."""
    if request.node.callspec.params['device'] == 'cpu':
        from lmdeploy_focus.engine import row_invariant
        monkeypatch.setattr(row_invariant, 'CHUNK', 32)


@pytest.fixture(scope='module')
def engine(pipelines):
    """Returns a function: device, engine options -> a pipeline there; what `auto` chooses depends on company."""

    def get(device, **options):
        room = ({'dtype': 'float32', 'max_batch_size': 12, 'num_gpu_blocks': 128} if device == 'cpu'
                else {'max_batch_size': 64, 'num_gpu_blocks': 1024})
        return pipelines(**{'device_type': device, 'focus_policy': 'always', **room, **options})

    return get


@pytest.fixture(scope='module')
def encoded():
    """Returns a function: number -> token ids of held-out questions, as a chat."""
    from transformers import AutoTokenizer

    from eval.demo_models import checkpoint, tasks
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.FOLDER / 'sdar')

    def get(count):
        items = tasks.eval_set(None, -(-count // len(tasks.TASKS)))
        items = [items[at] for at in random.Random(0).sample(range(len(items)), count)]
        return [tokenizer.apply_chat_template([{'role': 'user', 'content': item.prompt}], add_generation_prompt=True,
                                              return_dict=False) for item in items]

    return get
