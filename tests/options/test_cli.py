"""The stock command line with our options, up to where LMDeploy would load the model."""
import copy

import pytest
from lmdeploy.messages import PytorchEngineConfig, TurbomindEngineConfig

from lmdeploy_focus import cli, patches
from lmdeploy_focus.cli import CHAT_LACKS
from lmdeploy_focus.config import OPTIONS, FocusEngineConfig

CHAT = ('chat', )
SERVER = ('serve', 'api_server')
COMMANDS = pytest.mark.parametrize('command', [CHAT, SERVER], ids=['chat', 'api_server'])
# api_server asks torch.cuda for the batch size where it is not given
BATCH = ('--max-batch-size', '8')


@COMMANDS
def test_help_shows_every_option_in_one_group(command_line, command):
    """Red when an option or its default is missing from --help, or when an alias of the reference shows up."""
    printed = command_line.help(*command)
    assert printed.count('FOCUS arguments:') == 1
    group = ' '.join(printed.partition('FOCUS')[2].split())
    for option in OPTIONS:
        shown = group.partition(f' {option.flag} ')[2].partition(' --')[0]
        assert f'Default: {option.default.partition(";")[0]}' in shown, option.flag
    for alias in ('--dllm-enable-focus', '--dllm-enable-delayed-cache', '--dllm-focus-alpha'):
        assert alias not in printed


def test_chat_has_what_the_server_has(command_line):
    """Red when `chat` still lacks one of the server's block-diffusion options, or --max-batch-size."""
    printed = command_line.help(*CHAT)
    for name in CHAT_LACKS:
        assert f'--{name.replace("_", "-")}' in printed


@COMMANDS
def test_focus_delivers_our_config(command_line, command, demo):
    """Red when an option gets lost between the command line and the engine."""
    started = command_line.run(*command, demo / 'sdar', '--focus', '--focus-policy', 'always', '--focus-alpha', '2.5',
                               '--focus-selection', 'random', '--focus-keep=9', '--focus-cache', 'delayed',
                               '--focus-kv-visible', 'reference', '--focus-commit', 'full',
                               '--dllm-confidence-threshold', '0.75', '--dllm-unmasking-strategy', 'sequential',
                               '--dllm-denoising-steps', '4', '--session-len', '512', *BATCH)
    config = started.config
    assert type(config) is FocusEngineConfig
    params = config.focus_params()
    assert vars(params) == {'policy': 'always', 'alpha': 2.5, 'selection': 'random', 'keep': 9, 'cache': 'delayed',
                            'kv_visible': 'reference', 'commit': 'full', 'deterministic': False}
    assert (config.dllm_confidence_threshold, config.dllm_unmasking_strategy) == (0.75, 'sequential')
    assert (config.dllm_denoising_steps, config.max_batch_size, config.session_len) == (4, 8, 512)
    assert config.enable_metrics is (command == SERVER)
    assert not {key for key in started.keywords if 'focus' in key}


@COMMANDS
def test_focus_alone_means_the_defaults(command_line, command, demo):
    """Red when the command line has defaults of its own, or when LMDeploy cannot see the block length to bound the
    batch."""
    config = command_line.run(*command, demo / 'sdar', '--focus', *BATCH).config
    expected = FocusEngineConfig(max_batch_size=8, dllm_block_length=32)
    if command == CHAT:
        expected.enable_metrics = False
    else:
        expected.enable_mp_engine = config.enable_mp_engine
    assert config == expected
    assert config.dllm_confidence_threshold == 0.8


@COMMANDS
@pytest.mark.parametrize('backend', [(), ('--backend', 'turbomind'), ('--backend', 'pytorch')])
@pytest.mark.parametrize('flag', [('--focus', ), ('--device', 'cpu')])
def test_our_options_mean_the_pytorch_engine(command_line, command, backend, flag, demo):
    """Red when LMDeploy's choice of backend decides."""
    started = command_line.run(*command, demo / 'sdar', *flag, *backend, *BATCH)
    assert isinstance(started.config, FocusEngineConfig)
    assert started.keywords.get('backend', 'pytorch') == 'pytorch'


@COMMANDS
@pytest.mark.parametrize('model', ['sdar', 'ar'])
def test_device_cpu_without_focus(command_line, command, model, demo):
    """Red when argparse, the batch size or LMDeploy's config refuse the device."""
    config = command_line.run(*command, demo / model, '--device', 'cpu').config
    assert type(config) is FocusEngineConfig
    assert (config.device_type, config.focus, config.dllm_confidence_threshold) == ('cpu', False, 0.85)
    assert config.max_batch_size > 0


@COMMANDS
def test_float32_on_a_cpu(command_line, command, demo):
    """Red when the only dtype that old CPUs are fast in cannot be asked for, or is let through on a GPU."""
    config = command_line.run(*command, demo / 'sdar', '--device', 'cpu', '--focus', '--dtype', 'float32').config
    assert (config.device_type, config.dtype) == ('cpu', 'float32')
    for words in ((), ('--focus', )):
        assert '--dtype is float32' in command_line.refused(*command, demo / 'sdar', '--dtype', 'float32', *words)


@COMMANDS
def test_device_cpu_with_focus(command_line, command, demo):
    """Red when one of the two options makes the other get lost."""
    config = command_line.run(*command, demo / 'sdar', '--device=cpu', '--focus').config
    assert (config.device_type, config.focus, config.dllm_confidence_threshold) == ('cpu', True, 0.8)
    assert not {row.name for row in patches.rows('cpu') if not patches.applied(row)}


@COMMANDS
def test_without_our_options_the_stock_objects_pass(command_line, command, demo):
    """Red when a command that has none of our options gets anything else than it would get without us."""
    started = command_line.run(*command, demo / 'ar', '--backend', 'pytorch', *BATCH)
    assert type(started.config) is PytorchEngineConfig
    assert started.config.dllm_confidence_threshold == 0.85
    assert not {key for key in started.keywords if 'focus' in key or key.startswith('dllm_unmasking')}
    turbomind = command_line.run(*command, demo / 'ar', '--backend', 'turbomind', *BATCH).config
    assert isinstance(turbomind, (TurbomindEngineConfig, PytorchEngineConfig))
    assert not isinstance(turbomind, FocusEngineConfig)


def test_chat_without_our_options_hands_on_stocks_keywords(command_line, demo):
    """Red when the options that we add to `chat` reach LMDeploy's own code although nobody gave them."""
    given = command_line.run(*CHAT, demo / 'ar', '--backend', 'pytorch').keywords
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    stock = command_line.run(*CHAT, demo / 'ar', '--backend', 'pytorch').keywords
    assert given == stock


def test_the_options_added_to_chat_work_without_focus(command_line, demo):
    """Red when they are taken and then dropped."""
    config = command_line.run(*CHAT, demo / 'ar', '--backend', 'pytorch', '--dllm-confidence-threshold', '0.5',
                              '--max-batch-size', '3').config
    assert type(config) is PytorchEngineConfig
    assert (config.dllm_confidence_threshold, config.max_batch_size) == (0.5, 3)


@COMMANDS
def test_a_block_diffusion_checkpoint_without_our_options(command_line, command, demo):
    """Red when our config builder does not get into the engine's process, or when anything but that changes."""
    words = ('--dllm-block-length', '2', *(BATCH if command == SERVER else ()))
    config = command_line.run(*command, demo / 'sdar', *words).config
    assert type(config) is FocusEngineConfig
    assert not config.focus
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    stock = command_line.run(*command, demo / 'sdar', *words, '--backend', 'pytorch').config
    assert type(stock) is PytorchEngineConfig
    assert {name: getattr(config, name) for name in vars(stock)} == vars(stock)


@COMMANDS
@pytest.mark.parametrize('words, fields', [
    (('--dllm-enable-focus', ), {'focus_policy': 'auto', 'focus_alpha': 1.5}),
    (('--dllm-enable-focus', '--dllm-enable-delayed-cache', '--dllm-focus-alpha', '1.2'),
     {'focus_policy': 'auto', 'focus_alpha': 1.2}),
    (('--dllm-enable-delayed-cache', ), {'focus_policy': 'never'}),
    (('--focus', '--dllm-enable-delayed-cache'), {'focus_policy': 'auto'}),
    (('--dllm_enable_focus', '--dllm_focus_alpha=3'), {'focus_alpha': 3.0}),
])
def test_the_options_of_the_reference(command_line, command, words, fields, demo):
    """Red when an alias means something else than in the reference implementation."""
    config = command_line.run(*command, demo / 'sdar', *words, *BATCH).config
    assert config.focus
    assert {name: getattr(config, name) for name in fields} == fields


@COMMANDS
def test_an_autoregressive_model_with_focus(command_line, command, demo):
    """Red when --focus on such a model is ignored."""
    message = command_line.refused(*command, demo / 'ar', '--focus', *BATCH)
    assert '--focus' in message
    assert 'Qwen3ForCausalLM' in message


@COMMANDS
def test_no_block_length(command_line, command, checkpoint):
    """Red when LMDeploy's default of 4 is taken."""
    folder = checkpoint(block_size='absent')
    assert '--dllm-block-length' in command_line.refused(*command, folder, '--focus', *BATCH)
    assert command_line.run(*command, folder, '--focus', '--dllm-block-length', '8', *BATCH).config.focus


@COMMANDS
@pytest.mark.parametrize('words', [('--focus-alpha', '2'), ('--focus-keep', '3'), ('--focus-deterministic', ),
                                   ('--dllm-focus-alpha', '2')])
def test_options_that_would_do_nothing(command_line, command, words, demo):
    """Red when an option of ours is silently without effect."""
    flag = words[0].replace('--dllm-focus', '--focus')
    assert f'{flag} must be given with --focus' in command_line.refused(*command, demo / 'sdar', *words, *BATCH)


@COMMANDS
def test_wrong_options_are_told_before_a_download(command_line, command):
    """Red when a hub's model is downloaded first: the fixture fails on that."""
    for words in (('--focus-alpha', '0'), ('--dllm-confidence-threshold', '0'), ('--dp', '2')):
        assert words[0] in command_line.refused(*command, 'JetLM/SDAR-8B-Chat-b32', '--focus', *words)


@COMMANDS
def test_a_moved_target_of_a_later_group(command_line, command, demo, monkeypatch):
    """Red when a patch that does not fit is told later than at the start, or by a traceback."""
    engine = patches.rows('engine')
    patches.undo(engine)
    stale = copy.copy(engine[0])
    object.__setattr__(stale, 'written_for', {'lmdeploy.messages:PytorchEngineConfig': 'sha256:0'})
    monkeypatch.setattr(patches, 'REGISTER', (stale, *[row for row in patches.REGISTER if row is not engine[0]]))
    message = command_line.refused(*command, demo / 'sdar', '--focus', *BATCH)
    assert message.startswith('lmdeploy: error: ')
    assert 'lmdeploy.messages:PytorchEngineConfig has moved' in message
    assert command_line.run(*command, demo / 'sdar', *BATCH).config.focus is False


def test_conversion_is_the_running_commands(demo):
    """Red when a config is converted outside a command that asked for it, or a TurboMind config at all."""
    with cli._converting(None):
        keywords = cli.convert_config(str(demo / 'sdar'), {'backend_config': PytorchEngineConfig(dp=2, tp=2)})
    assert type(keywords['backend_config']) is FocusEngineConfig
    assert (keywords['backend_config'].dp, keywords['backend_config'].focus) == (2, False)
    turbomind = {'backend_config': TurbomindEngineConfig()}
    with cli._converting(None):
        assert cli.convert_config(str(demo / 'sdar'), turbomind) == turbomind
    assert cli.convert_config(str(demo / 'sdar'), turbomind) is turbomind


def test_disabled_by_the_environment(command_line, monkeypatch):
    """Red when LMDEPLOY_FOCUS_DISABLE=1 leaves anything of ours in the command line."""
    patches.undo(patches.rows('cli'))
    monkeypatch.setenv('LMDEPLOY_FOCUS_DISABLE', '1')
    cli.install()
    printed = command_line.help(*CHAT)
    assert 'focus' not in printed.lower()
    assert 'cpu}' not in printed
    monkeypatch.delenv('LMDEPLOY_FOCUS_DISABLE')
    cli.install()
    assert '--focus' in command_line.help(*CHAT)


@pytest.mark.parametrize('words, ours', [
    ('chat m --focus', True), ('chat m --focus-alpha 2', True), ('chat m --focus_keep=3', True), ('--focus-a=2', True),
    ('serve api_server m --dllm-enable-focus', True), ('chat m --dllm_enable_delayed_cache', True),
    ('chat m --dllm-focus-alpha=2', True), ('chat m --device cpu', True), ('chat m --device=cpu', True),
    ('chat m --device cuda', False), ('chat m --device', False), ('chat cpu', False), ('chat --tp 2 focus', False),
    ('chat m --dllm-block-length 32', False), ('', False),
])
def test_our_options_are_known_without_a_parser(words, ours):
    """Red when, on an LMDeploy that does not fit, a command with our options is left to argparse, or one without them
    is stopped."""
    assert cli._has_our_options(words.split()) is ours
