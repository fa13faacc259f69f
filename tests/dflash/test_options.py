"""`DFlashConfig`, the command line and the README."""
import importlib
import pickle
import sys
from copy import deepcopy

import pytest
from lmdeploy.messages import PytorchEngineConfig, SpeculativeConfig

from lmdeploy_focus import DFlashConfig, FocusEngineConfig, cli, patches
from lmdeploy_focus.admission import admit
from lmdeploy_focus.dflash.admission import admit_engine
from lmdeploy_focus.dflash.config import DFLASH_OPTIONS, dflash_options_table


class Started(BaseException):
    """Raised where LMDeploy would begin to load the model, with what it would begin with."""


@pytest.fixture
def lmdeploy(monkeypatch, capsys):
    """Returns a function: words of a command -> the keywords the engine would be started with, or the last line on
    stderr of a command that exits with status 2."""

    def forget_parsers():
        for module, owner in (('lmdeploy.cli.cli', 'CLI'), ('lmdeploy.cli.serve', 'SubCliServe'),
                              ('lmdeploy.cli.lite', 'SubCliLite')):
            subparsers = getattr(importlib.import_module(module), owner).subparsers
            for name in set(subparsers.choices) - {'serve', 'lite'}:
                del subparsers.choices[name]

    def start(*args, **keywords):
        raise Started(keywords)

    def run(*words):
        forget_parsers()
        monkeypatch.setattr(sys, 'argv', ['lmdeploy', *map(str, words)])
        monkeypatch.setenv('COLUMNS', '200')
        try:
            importlib.import_module('lmdeploy.cli.entrypoint').run()
        except Started as started:
            return started.args[0]
        except SystemExit as exited:
            out, err = capsys.readouterr()
            if exited.code == 0:
                return out
            assert exited.code == 2, err
            return err.strip().splitlines()[-1]
        raise AssertionError('the command ended')

    monkeypatch.setattr(importlib.import_module('lmdeploy.api'), 'Pipeline', start)
    monkeypatch.setattr(importlib.import_module('lmdeploy.serve.openai.api_server'), 'get_task',
                        lambda *args, **keywords: start(**keywords))
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    cli.install()
    yield run
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    forget_parsers()


CPU = ('--device', 'cpu')


def test_config(demo):
    """Red when the draft length is not the block minus one, the config is lost in pickle, or a name is not exported."""
    config = DFlashConfig(str(demo / 'dflash'))
    assert isinstance(config, SpeculativeConfig)
    assert (config.method, config.num_speculative_tokens) == ('dflash', 15)
    assert DFlashConfig(demo / 'dflash', 4).num_speculative_tokens == 4
    for copy in (pickle.loads(pickle.dumps(config)), deepcopy(config)):
        assert type(copy) is DFlashConfig
        assert vars(copy) == vars(config)


@pytest.mark.parametrize('tokens', [0, 16, 3.0, True])
def test_a_wrong_draft_length(demo, tokens):
    """Red when a draft beyond the block is taken, or the message has no flag, value or bound."""
    with pytest.raises(ValueError, match=f'--dflash-draft-tokens .draft_tokens. is {tokens}; it must be at '):
        DFlashConfig(str(demo / 'dflash'), tokens)


@pytest.mark.parametrize('changes,message', [
    ({'num_target_layers': 12}, 'num_target_layers of .* is 12; .*num_hidden_layers .*8'),
    ({'hidden_size': 512}, 'hidden_size of .* is 512; .*256'),
    ({'vocab_size': 4097}, 'vocab_size of .* is 4097; .*4096'),
    ({'nested': {'mask_token_id': 4096}}, 'mask_token_id of .* is 4096; .*below vocab_size .*4096'),
    ({'nested': {'target_layer_ids': [1, 8]}}, r'target_layer_ids of .* \[1, 8\]; .*at most 7'),
    ({'num_key_value_heads': 4}, r'tensor layers.0.self_attn.k_proj.weight .* is \[128, 256\].*\[256, 256\]'),
])
def test_a_drafter_of_another_target(demo, drafter, changes, message):
    """Red when a drafter that cannot go with the target is found out only in the engine, or its field is not named."""
    config = FocusEngineConfig(focus=False, device_type='cpu')
    with pytest.raises(ValueError, match=message):
        admit(str(demo / 'ar'), config, speculative_config=DFlashConfig(str(drafter(**changes))))


def test_what_a_config_does_not_tell_is_not_refused(demo, drafter):
    """Red when a field that older drafters lack is required."""
    folder = drafter(num_target_layers='absent', vocab_size='absent', layer_types='absent', block_size='absent')
    admit(str(demo / 'ar'), FocusEngineConfig(focus=False, device_type='cpu'),
          speculative_config=DFlashConfig(str(folder)))


@pytest.mark.parametrize('option,value', [('quant_policy', 8), ('tp', 2), ('adapters', {'a': 'b'}),
                                          ('enable_microbatch', True), ('device_type', 'cuda')])
def test_options_that_do_not_go_with_it(demo, option, value):
    """Red when a combination that is not right is not refused by the option's name."""
    config = FocusEngineConfig(focus=False, device_type='cpu')
    setattr(config, option, value)
    with pytest.raises(ValueError, match=option):
        admit(str(demo / 'ar'), config, speculative_config=DFlashConfig(str(demo / 'dflash')))


def test_another_backend(demo):
    """Red when a drafter is passed over because the backend has none."""
    config = DFlashConfig(str(demo / 'dflash'))
    for backend, engine in (('turbomind', None), ('pytorch', None)):
        with pytest.raises(ValueError, match='backend_config .*PytorchEngineConfig'):
            admit_engine(str(demo / 'ar'), backend, engine, config)
    with pytest.raises(ValueError, match="device_type.* is 'cuda'"):
        admit_engine(str(demo / 'ar'), 'pytorch', PytorchEngineConfig(), config)


@pytest.mark.parametrize('command', [('chat', ), ('serve', 'api_server')])
def test_command_line(lmdeploy, demo, command):
    """Red when a flag does not reach the engine, or the engine is another than PyTorch's with focus off."""
    given = lmdeploy(*command, demo / 'ar', '--dflash', demo / 'dflash', *CPU)
    config, dflash = given['backend_config'], given.get('speculative_config')
    assert (type(config), config.focus, config.device_type) == (FocusEngineConfig, False, 'cpu')
    if command == ('chat', ):  # the server is stopped before it hands the drafter on
        assert (type(dflash), dflash.num_speculative_tokens) == (DFlashConfig, 15)
        shorter = lmdeploy(*command, demo / 'ar', '--dflash', demo / 'dflash', '--dflash-draft-tokens', 7, *CPU)
        assert shorter['speculative_config'].num_speculative_tokens == 7


@pytest.mark.parametrize('words,message', [
    (('--focus', *CPU), '--dflash must not be given with --focus'),
    ((), '--device (device_type) is'),
    (('--dflash-draft-tokens', '16', *CPU), '--dflash-draft-tokens (draft_tokens) is 16; it must be at most 15'),
    (('--dflash-draft-tokens', 'x', *CPU), '--dflash-draft-tokens'),
    (('--speculative-algorithm', 'eagle3', *CPU), '--speculative-algorithm is'),
    (('--speculative-num-draft-tokens', '4', *CPU), '--speculative-num-draft-tokens is 4'),
    (('--speculative-draft-model', 'x', *CPU), '--speculative-draft-model is'),
])
def test_command_line_refuses(lmdeploy, demo, words, message):
    """Red when a combination is passed over, or the command does not end with status 2 before anything is loaded."""
    assert message in lmdeploy('chat', demo / 'ar', '--dflash', demo / 'dflash', *words)


def test_command_line_refuses_models(lmdeploy, demo, drafter):
    """Red when a wrong target or drafter does not end the command with status 2 and its name."""
    assert 'SDARForCausalLM' in lmdeploy('chat', demo / 'sdar', '--dflash', demo / 'dflash', *CPU)
    assert 'DFlashDraftModel' in lmdeploy('chat', demo / 'ar', '--dflash', demo / 'ar', *CPU)
    assert '--dflash-draft-tokens must be given with --dflash' in lmdeploy('chat', demo / 'ar', *CPU,
                                                                           '--dflash-draft-tokens', 3)
    folder = drafter()
    (folder / 'model.safetensors').write_bytes(b'\0' * 64)
    assert 'model.safetensors' in lmdeploy('serve', 'api_server', demo / 'ar', '--dflash', folder, *CPU)


def test_stock_speculation_stays_stocks(lmdeploy, demo):
    """Red when LMDeploy's own DFlash is made ours without our flag."""
    given = lmdeploy('chat', demo / 'ar', '--backend', 'pytorch', '--speculative-algorithm', 'dflash',
                     '--speculative-draft-model', demo / 'dflash')
    assert type(given['speculative_config']) is SpeculativeConfig
    assert type(given['backend_config']) is PytorchEngineConfig


@pytest.mark.parametrize('command', [('chat', ), ('serve', 'api_server')])
def test_help_has_the_table(lmdeploy, command):
    """Red when an option is not in `--help` with its default."""
    printed = ' '.join(lmdeploy(*command, '--help').split())
    for option in DFLASH_OPTIONS:
        assert f'{option.flag} ' in printed
        assert f'{option.help[1:]}. Default: {option.default}' in printed


def test_readme_has_the_table():
    """Red when an option is added or changed and the README is not."""
    from pathlib import Path
    readme = (Path(__file__).parents[2] / 'README.md').read_text(encoding='utf-8')
    between = readme.partition('<!-- dflash options -->\n')[2].partition('\n<!-- /dflash options -->')[0]
    assert between == dflash_options_table()
