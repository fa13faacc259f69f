"""Engines of the demo model on the CPU, built once a session for each set of options."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SDAR = str(ROOT / 'eval' / 'demo_models' / 'sdar')
MASK_TOKEN = 3
STOP_TOKENS = (0, 2)
BLOCK = 32


@pytest.fixture(scope='session')
def pipelines():
    """Returns a function: engine options -> a pipeline of the demo SDAR model on the CPU."""
    from lmdeploy import pipeline

    from lmdeploy_focus import FocusEngineConfig
    built = {}

    def get(**options):
        options = {'device_type': 'cpu', 'num_gpu_blocks': 256, 'max_batch_size': 64, 'session_len': 1024, **options}
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = pipeline(SDAR, backend_config=FocusEngineConfig(**options), log_level='ERROR')
        return built[key]

    yield get
    for pipe in built.values():
        pipe.close()


@pytest.fixture(scope='session')
def demo_items():
    """64 held-out items, 16 of each judged task."""
    from eval.demo_models import tasks
    return [item for task in tasks.TASKS for item in tasks.eval_set(task, 16)]


@pytest.fixture(scope='session')
def decode():
    """Returns a function: pipeline, prompts, generation options -> token ids of each answer, without the stop token."""
    from lmdeploy import GenerationConfig

    def run(pipe, prompts, **options):
        config = GenerationConfig(**{'max_new_tokens': 64, 'do_sample': False, **options})
        return [list(answer.token_ids) for answer in pipe(prompts, gen_config=config)]

    return run
