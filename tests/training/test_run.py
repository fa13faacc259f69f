"""Whole runs of `scripts/train_dflash.py` on the demo target: losses fall, a stop loses nothing, the engine admits what
is written."""
import contextlib
import io
import json
import os
import signal

import pytest
import torch

from scripts import train_dflash
from scripts.dflash_training import answers as answers_module
from scripts.dflash_training import trainer as trainer_module
from scripts.dflash_training.layout import new_draft
from scripts.dflash_training.prompts import Sample
from scripts.dflash_training.state import STATE
from scripts.dflash_training.target import Target
from scripts.dflash_training.trainer import Batches, Trainer, learning_rate_factor


def arguments(demo, prompts, output, *more):
    return [str(demo / 'ar'), '--prompts', str(prompts), '--output', str(output), '--layers', '1', '--block-size', '4',
            '--target-layers', '1,4', '--steps', '4', '--batch', '2', '--anchors', '4', '--max-new-tokens', '8',
            '--held-out', '2', '--lr', '3e-3', '--sampled-share', '0.5', *more]


@pytest.fixture(scope='module')
def finished(demo, prompts, tmp_path_factory):
    """OUTPUT of a run that was not stopped, and what it showed."""
    output = tmp_path_factory.mktemp('finished')
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert train_dflash.main(arguments(demo, prompts, output, '--compare', str(demo / 'dflash'))) == 0
    return output, shown.getvalue()


def test_a_run_and_what_it_writes(demo, prompts, finished, capsys):
    """Red when the files are not those of a published drafter, the engine's admission refuses them, another drafter is
    not measured beside it, or progress is not shown."""
    from lmdeploy_focus.dflash.admission import check_pair
    from lmdeploy_focus.dflash.checkpoint import check_tensors, read_shapes, tensor_shapes
    from lmdeploy_focus.dflash.drafter import read_drafter
    output, shown = finished
    drafter = read_drafter(str(output))
    config = json.loads((output / 'config.json').read_text())
    ar = json.loads((demo / 'ar' / 'config.json').read_text())
    check_pair('ar', ar, drafter)
    check_tensors(read_shapes(str(output)), tensor_shapes(drafter, 256, 2), 'written')
    assert config['block_size'] == config['dflash_config']['block_size'] == 4
    assert config['dflash_config'] == {'block_size': 4, 'mask_token_id': 3, 'target_layer_ids': [1, 4]}
    assert config['rope_theta'] == config['rope_parameters']['rope_theta'] == ar['rope_theta']
    assert (drafter.num_target_layers, drafter.vocab_size, drafter.dtype) == (8, 4096, 'bfloat16')
    journal = json.loads((output / 'training.json').read_text())
    assert len(journal['losses']) == journal['steps'] == 4
    assert journal['acceptance'][-1]['step'] == 4 and journal['acceptance'][-1]['acceptance_length'] >= 1
    assert journal['compared']['acceptance_length'] > journal['acceptance'][-1]['acceptance_length']
    assert all(word in shown for word in ('answers', 'training', 'loss', 'right 1:', 'tokens/s', '4/4'))
    # It cannot be gone on with by another command.
    with pytest.raises(SystemExit, match='2'):
        train_dflash.main(arguments(demo, prompts, output, '--lr', '1e-4'))
    assert '--lr is 0.0001; it must be 0.003' in capsys.readouterr().err


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(demo, prompts, finished, tmp_path, monkeypatch):
    """Red when a signal loses the step, or weights, moments, the learning rate, batches or anchors differ after a
    resume: every loss is the same number."""
    whole, parts = finished[0], tmp_path / 'parts'
    step = trainer_module.Trainer.train_step

    def stop_at_two(self):
        result = step(self)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result
    monkeypatch.setattr(trainer_module.Trainer, 'train_step', stop_at_two)
    assert train_dflash.main(arguments(demo, prompts, parts)) == train_dflash.STOPPED
    assert json.loads((parts / 'training.json').read_text())['steps'] == 2
    monkeypatch.undo()
    monkeypatch.setattr(Target, 'answer', lambda *args: pytest.fail('answered again'))
    assert train_dflash.main(arguments(demo, prompts, parts, '--resume', 'always')) == 0
    states = [torch.load(folder / STATE, weights_only=True) for folder in (whole, parts)]
    assert states[0]['losses'] == states[1]['losses'] and len(states[0]['losses']) == 4
    for name, weight in states[0]['draft'].items():
        assert torch.equal(weight, states[1]['draft'][name]), name
    assert (whole / 'model.safetensors').read_bytes() == (parts / 'model.safetensors').read_bytes()


def test_answers_survive_a_stop(target, make, tmp_path, monkeypatch):
    """Red when an answered prompt is answered again, a line that was cut off spoils the file, or the answers of a
    resumed run are others."""
    options, _ = make(max_new_tokens=6, sampled_share=0.5, generation_batch=2)
    prompts = [Sample((1, 40 + index)) for index in range(6)]
    whole = answers_module.answer_prompts(target, prompts, prompts[:1], options, tmp_path / 'whole.jsonl')
    path = tmp_path / 'parts.jsonl'
    lines = (tmp_path / 'whole.jsonl').read_text().splitlines(keepends=True)
    assert len(lines) == 7
    path.write_text(''.join(lines[:4]) + lines[4][:9])
    calls, answer = [], target.answer
    monkeypatch.setattr(target, 'answer', lambda *args: calls.append(args) or answer(*args))
    assert answers_module.answer_prompts(target, prompts, prompts[:1], options, path) == whole
    assert len(path.read_text().splitlines()) == 7 and 1 <= len(calls) <= 3
    assert len(whole[1][0].answer) <= 6 + options.block_size and all(len(s.answer) <= 6 for s in whole[0])


def test_the_loss_falls(target, make, samples):
    """Red when the drafter does not learn: 12 steps on two answers."""
    torch.manual_seed(0)
    options, plan = make(steps=12)
    trainer = Trainer(target, new_draft(plan), samples[2:4], samples[2:3], options)
    losses = [trainer.train_step()[0].loss.item() for _ in range(12)]
    assert sum(losses[-3:]) / 3 < min(5.5, losses[0] / 3)


def test_the_learning_rate():
    """Red when there is no warm-up over 4 %, or the cosine ends elsewhere than at 5 %."""
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0
    assert factors[4:] == sorted(factors[4:], reverse=True) and factors[-1] == pytest.approx(0.05)
    assert 0 < learning_rate_factor(0, 1) <= 1


def test_batches():
    """Red when a pass repeats or leaves out a sample, two passes are the same, or a batch depends on those before."""
    samples = [Sample((index, ), (1, ) * (index + 2)) for index in range(10)]
    batches = Batches(samples, 2, 0)
    passes = [[sample for step in range(5) for sample in batches[first + step]] for first in (0, 5)]
    assert all(sorted(sample.prompt[0] for sample in one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] and Batches(samples, 2, 0)[7] == batches[7]
    assert len(Batches(samples[:3], 8, 0)[5]) == 3


@pytest.mark.slow
def test_the_engine_decodes_with_it(demo, prompts, tmp_path):
    """Red when LMDeploy cannot load what is written, or an answer with it differs from the target's own."""
    from lmdeploy import GenerationConfig, pipeline

    from lmdeploy_focus import DFlashConfig, FocusEngineConfig
    output = tmp_path / 'out'
    assert train_dflash.main(arguments(demo, prompts, output)) == 0
    texts = []
    for draft in (None, DFlashConfig(str(output))):
        config = FocusEngineConfig(focus=False, device_type='cpu', dtype='float32', num_gpu_blocks=64, session_len=512)
        pipe = pipeline(str(demo / 'ar'), backend_config=config, speculative_config=draft, log_level='ERROR')
        texts.append(pipe('Solve for x: 3x + 4 = 19', gen_config=GenerationConfig(max_new_tokens=48)).text)
        pipe.close()
    assert texts[0] == texts[1] and len(texts[0]) > 10
