"""The options are described in three places that must agree: README, `--help` (test_cli) and the dataclass."""
import dataclasses
from pathlib import Path

from lmdeploy_focus.config import OPTIONS, FocusEngineConfig, default_threshold, options_table

README = Path(__file__).resolve().parents[2] / 'README.md'


def test_the_readmes_table():
    """Red when an option, a bound or a default changes without the README.

    `python -c 'from lmdeploy_focus.config import options_table; print(options_table())'` prints the table.
    """
    text = README.read_text(encoding='utf-8')
    between = text.partition('<!-- options -->')[2].partition('<!-- /options -->')[0]
    assert between.strip() == options_table()


def test_the_defaults_in_words_are_the_dataclass_defaults():
    """Red when a default changes in the dataclass and not in the words, or the other way round."""
    words = {
        'dllm_confidence_threshold': f'{default_threshold(True)} with focus, else {default_threshold(False)}',
        'dllm_denoising_steps': 'the block length',
        'dllm_block_length': "the checkpoint's, else its name's (-b32)",
        'focus': 'off; on in FocusEngineConfig',
        'focus_keep': 'none',
    }
    defaults = {field.name: field.default for field in dataclasses.fields(FocusEngineConfig)}
    assert defaults['focus'] is True
    for option in OPTIONS:
        default = defaults[option.field]
        if option.field in words:
            assert option.default == words[option.field]
            assert default is None or option.field == 'focus'
        else:
            assert option.default == {True: 'on', False: 'off'}.get(default, str(default))


def test_every_focus_field_is_an_option():
    """Red when a field of ours has no flag and no line in the README."""
    ours = {field.name for field in dataclasses.fields(FocusEngineConfig) if field.name.startswith('focus')}
    assert ours == {option.field for option in OPTIONS if option.field.startswith('focus')}
