"""The demo target and tiny drafters for the tests of `scripts/train_dflash.py`."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

AR = ROOT / 'eval' / 'demo_models' / 'ar'


@pytest.fixture(scope='session')
def demo():
    """Folder of the demo checkpoints: `ar` is the target, `dflash` its drafter."""
    return AR.parent


@pytest.fixture(scope='session')
def facts():
    """Config, tokenizer and generation config of the demo target."""
    from scripts.dflash_training.plan import read_target
    return read_target(str(AR))


@pytest.fixture(scope='session')
def make(facts, tmp_path_factory):
    """Returns a function: options -> the plan for the demo target."""
    from scripts.dflash_training.options import Options
    from scripts.dflash_training.plan import make_plan

    def build(**options):
        chosen = Options(target=str(AR), output=tmp_path_factory.mktemp('output'),
                         **{'layers': 2, 'block_size': 8, 'batch': 2, 'anchors': 4, 'lr': 3e-3} | options)
        return chosen, make_plan(chosen, *facts)
    return build


@pytest.fixture(scope='session')
def target(make):
    """The demo target in fp32, for drafters of block 8."""
    import torch

    from scripts.dflash_training.target import load_target
    return load_target(str(AR), make()[1], 'cpu', torch.float32)


@pytest.fixture(scope='session')
def samples(facts):
    """A prompt of each judged task with the answer that the task calls right."""
    from eval.demo_models.tasks import eval_set
    from scripts.dflash_training.prompts import Encoder
    encoder = Encoder(facts[1], True, 4096)
    return [as_sample(encoder, item) for item in eval_set(None, 2)]


def as_sample(encoder, item):
    from scripts.dflash_training.prompts import Sample
    return Sample(encoder.prompt({'prompt': item.prompt}, ''), encoder.answer({'answer': item.reference}, '', 2))


@pytest.fixture(scope='session')
def prompts(tmp_path_factory):
    """A file of 12 training prompts, as messages."""
    import random

    from eval.demo_models.tasks import sample
    rng, path = random.Random(0), tmp_path_factory.mktemp('prompts') / 'prompts.jsonl'
    texts = [sample(rng, 'algebra', False)[0] for _ in range(12)]
    path.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': text}]}) + '\n' for text in texts))
    return path
