"""The register itself, against the installed LMDeploy."""
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from lmdeploy_focus.patches import REGISTER, models, rows, source_hash

from lmdeploy_focus import patches
from lmdeploy_focus.config import FocusDLLMConfig, FocusEngineConfig

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / 'eval/demo_models/sdar'


@pytest.mark.parametrize('row', REGISTER, ids=lambda row: row.name)
def test_a_row_is_whole_and_fits_the_installed_lmdeploy(row):
    """Red when upstream changes a source that a row relies on, or when a row leaves out what a reader needs."""
    assert row.group in ('cli', 'boundary', 'engine', 'cpu')
    assert row.written_for
    assert all((row.why, row.how, row.remove_when))
    assert {source: source_hash(source) for source in row.written_for} == dict(row.written_for)


def test_no_two_rows_share_a_target():
    """Red when a second row for a target would silently stay off, or when a group's name is misspelt."""
    assert len({row.target for row in REGISTER}) == len(REGISTER)
    assert sum(len(rows(group)) for group in ('cli', 'boundary', 'engine', 'cpu')) == len(REGISTER)


def test_patch_hashes_script(capsys, monkeypatch):
    """Red when the script misses a source, or does not fail on one that differs."""
    spec = importlib.util.spec_from_file_location('patch_hashes', ROOT / 'scripts/patch_hashes.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main() == 0
    printed = capsys.readouterr().out
    for row in REGISTER:
        assert all(f"'{source}': '{expected}'" in printed for source, expected in row.written_for.items())

    sources = ['lmdeploy.messages:PytorchEngineConfig', 'lmdeploy.messages:NoSuchThing']
    monkeypatch.setattr(script, 'REGISTER', (replace(REGISTER[0], written_for=dict.fromkeys(sources, 'sha256:0')), ))
    assert script.main() == 1
    assert capsys.readouterr().out.count('  ! ') == 2


def test_misc_config_carries_the_options_to_the_workers():
    """Red when the options are lost between the engine config and `MiscConfig`, or on the way through pickle."""
    config = FocusEngineConfig(focus_alpha=2.5, focus_keep=7, dllm_block_length=16, dllm_denoising_steps=3)
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
    carried = pickle.loads(pickle.dumps(ConfigBuilder.build_misc_config(config))).dllm_config
    assert type(carried) is FocusDLLMConfig
    assert carried.focus == config.focus_params()
    assert (carried.block_length, carried.denoising_steps, carried.confidence_threshold) == (16, 3, 0.8)


def test_misc_config_of_a_stock_config_is_stocks():
    """Red when a patched function does anything for a config that is not ours, or that has focus off."""
    FocusEngineConfig()
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.config import DLLMConfig
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
    for config in (PytorchEngineConfig(), FocusEngineConfig(focus=False)):
        assert type(ConfigBuilder.build_misc_config(config).dllm_config) is DLLMConfig


def test_the_model_class_is_chosen_by_config():
    """Red when registering our class changes what a stock config builds, or when focus builds the stock class."""
    config = FocusEngineConfig()
    from lmdeploy.pytorch.config import ModelConfig
    from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
    from lmdeploy.pytorch.model_inputs import BuildModelContext
    from lmdeploy.pytorch.models.patch import _get_model_class, _get_module_map
    hf_config = ModelConfig.from_pretrained(str(DEMO), dtype='float16', device_type='cpu').hf_config

    def original(model_config, **kwargs):
        return _get_model_class(model_config, _get_module_map()), model_config, kwargs

    build = models._build_model(original)
    stock = ConfigBuilder.build_misc_config(FocusEngineConfig(focus=False)).dllm_config
    for context in (None, BuildModelContext(), BuildModelContext(dllm_config=stock)):
        built, given, kwargs = build(hf_config, dtype='d', device='c', ctx_mgr='m', build_model_ctx=context)
        assert f'{built.__module__}.{built.__name__}' == 'lmdeploy.pytorch.models.sdar.SDARForCausalLM'
        assert given is hf_config
        assert kwargs == {'dtype': 'd', 'device': 'c', 'ctx_mgr': 'm', 'build_model_ctx': context}

    focus = BuildModelContext(dllm_config=ConfigBuilder.build_misc_config(config).dllm_config)
    built, given, _ = build(hf_config, build_model_ctx=focus)
    assert f'{built.__module__}.{built.__name__}' == 'lmdeploy_focus.models.sdar.FocusSDARForCausalLM'
    assert hf_config.architectures == ['SDARForCausalLM']
    assert given.hidden_size == hf_config.hidden_size

    hf_config.architectures = ['Qwen3ForCausalLM']
    with pytest.raises(ValueError, match='--focus .*Qwen3ForCausalLM.*SDARForCausalLM'):
        build(hf_config, build_model_ctx=focus)


def test_activation_patches_once_and_only_what_is_wanted():
    """Red when config objects patch again each time, or when the CPU's rows go on for a GPU."""
    from lmdeploy_focus import activation
    FocusEngineConfig()
    engine_rows = rows('engine')
    assert all(patches.applied(row) for row in engine_rows)
    patches.undo(engine_rows)
    activation.register()
    assert not any(patches.applied(row) for row in engine_rows)
    activation.activate()
    activation.activate()
    assert all(patches.applied(row) for row in engine_rows)
