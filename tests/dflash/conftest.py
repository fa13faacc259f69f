"""Engines of the demo target on the CPU, with its drafter and without, built once a session for each set of options."""
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

DEMO = ROOT / 'eval' / 'demo_models'


@pytest.fixture(scope='session')
def demo():
    """Folder of the demo checkpoints: `ar` is the target, `dflash` its drafter, `sdar` a block-diffusion model."""
    return DEMO


@pytest.fixture(scope='session')
def start():
    """Returns a function: target, drafter or None, engine options -> a pipeline in fp32; the caller closes it."""
    from lmdeploy import pipeline

    from lmdeploy_focus import DFlashConfig, FocusEngineConfig

    def build(target, draft, draft_tokens=None, **options):
        options = {'dtype': 'float32', 'num_gpu_blocks': 192, 'session_len': 1024, **options}
        config = FocusEngineConfig(focus=False, device_type='cpu', **options)
        return pipeline(str(target), backend_config=config, log_level='ERROR',
                        speculative_config=None if draft is None else DFlashConfig(str(draft), draft_tokens))

    return build


@pytest.fixture(scope='session')
def pipes(start):
    """Returns a function: engine options -> the plain pipeline and the one with the drafter, both kept."""
    built = {}

    def get(**options):
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = start(DEMO / 'ar', None, **options), start(DEMO / 'ar', DEMO / 'dflash', **options)
        return built[key]

    yield get
    for pair in built.values():
        for pipe in pair:
            pipe.close()


@pytest.fixture(scope='session')
def prompts():
    """32 held-out prompts as text with the chat's marks, eight of each judged task."""
    from eval.demo_models.evaluate import short_questions
    from eval.demo_models.tasks import TASKS
    from eval.demo_models.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(DEMO / 'ar')
    questions = short_questions(tokenizer, 8, TASKS)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in questions.prompts]


@pytest.fixture(scope='session')
def answer():
    """Returns a function: pipeline, prompts, generation options -> (token ids, finish reason, logprobs) of each."""
    from lmdeploy import GenerationConfig

    def run(pipe, texts, **options):
        config = GenerationConfig(**{'max_new_tokens': 64, 'do_sample': False, **options})
        outs = pipe(list(texts), gen_config=config, do_preprocess=False)
        return [(out.token_ids, out.finish_reason, out.logprobs) for out in outs]

    return run


@pytest.fixture
def drafter(tmp_path):
    """Returns a function: a copy of the demo drafter with changes to config.json ('absent' removes a field)."""

    def write(name='drafter', nested=None, **changes):
        folder = tmp_path / name
        shutil.copytree(DEMO / 'dflash', folder)
        config = json.loads((folder / 'config.json').read_text()) | changes
        if nested is not None and isinstance(config['dflash_config'], dict):
            config['dflash_config'] |= nested
        config = {key: value for key, value in config.items() if value != 'absent'}
        if isinstance(config.get('dflash_config'), dict):
            config['dflash_config'] = {k: v for k, v in config['dflash_config'].items() if v != 'absent'}
        (folder / 'config.json').write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def records(monkeypatch):
    """What the engines of this process verify during the test."""
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop

    from lmdeploy_focus import activation

    from .records import Records
    activation.activate_cpu()  # it would not know a function that is replaced here
    seen, original = Records(), EngineLoop._make_infer_outputs

    def recording(self, batched_outputs, running, model_inputs, delta):
        if getattr(batched_outputs.extra_outputs, 'draft_token_ids', None) is None:  # of an engine without a drafter
            return original(self, batched_outputs, running=running, model_inputs=model_inputs, delta=delta)
        seen.before(running, model_inputs is None)
        outputs = original(self, batched_outputs, running=running, model_inputs=model_inputs, delta=delta)
        seen.after(batched_outputs, running)
        return outputs

    monkeypatch.setattr(EngineLoop, '_make_infer_outputs', recording)
    return seen


@pytest.fixture
def preempted():
    """Returns a function: pipeline -> a list that gets, of each running sequence that loses its pages, the tokens that
    it had generated."""
    from lmdeploy.pytorch.messages import MessageStatus

    def watch(pipe):
        scheduler, lost = pipe.async_engine.engine.scheduler, []
        preempt = scheduler.preempt_seqs

        def count(seqs):
            seqs = list(seqs)
            lost.extend(seq.num_new_tokens for seq in seqs if seq.status == MessageStatus.RUNNING)
            preempt(seqs)

        scheduler.preempt_seqs = count
        return lost

    return watch
