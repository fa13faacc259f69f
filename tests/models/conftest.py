"""Checkpoints, engines and oracles of LLaDA2, SDAR-MoE and SDAR, built once a session."""
import sys
from pathlib import Path

import pytest

from . import checkpoints
from .oracles import Oracle

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    """Name -> folder of its checkpoint."""
    folder = tmp_path_factory.mktemp('models')
    return {name: checkpoints.write(folder / name, name) for name in checkpoints.MODELS}


@pytest.fixture(scope='session')
def oracles():
    """Name -> its oracle."""
    return {name: Oracle(checkpoints.weights(name), config) for name, config in checkpoints.MODELS.items()}


@pytest.fixture(scope='session')
def engine(folders):
    """Returns a function: name or folder, engine options -> a pipeline on the CPU, in fp32."""
    from lmdeploy import pipeline

    from lmdeploy_focus import FocusEngineConfig
    built = {}

    def get(model, **options):
        options = {'device_type': 'cpu', 'dtype': 'float32', 'num_gpu_blocks': 32, 'max_batch_size': 4,
                   'session_len': 512, **options}
        key = (str(model), *sorted(options.items()))
        if key not in built:
            built[key] = pipeline(str(folders.get(model, model)), backend_config=FocusEngineConfig(**options),
                                  log_level='ERROR')
        return built[key]

    yield get
    for pipe in built.values():
        pipe.close()


@pytest.fixture(scope='session')
def decode():
    """Returns a function: pipeline, texts, generation options -> token ids of each answer, without the stop token."""
    from lmdeploy import GenerationConfig

    def run(pipe, texts, **options):
        config = GenerationConfig(**{'do_sample': False, **options})
        return [list(answer.token_ids) for answer in pipe(texts, gen_config=config, do_preprocess=False)]

    return run


def model_of(pipe):
    """The model in a pipeline's engine."""
    return pipe.async_engine.engine.executor.model_agent.patched_model.get_model()
