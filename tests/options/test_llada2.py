"""LLaDA2 on the command line: LMDeploy has no model of it, so ours runs with focus off too, and says what is wrong."""
import json

import pytest

from lmdeploy_focus.config import FocusEngineConfig
from tests.models import checkpoints

BATCH = ('--max-batch-size', '8')
COMMANDS = pytest.mark.parametrize('command', [('chat', ), ('serve', 'api_server')], ids=['chat', 'api_server'])
WAYS = pytest.mark.parametrize('way', [(), ('--focus', ), ('--device', 'cpu'), ('--focus', '--device', 'cpu')], ids=str)


@pytest.fixture
def llada2(tmp_path):
    """Writes the config.json of a LLaDA2 checkpoint and gives its folder."""

    def write(generation=None, **changes):
        config = {key: value for key, value in (checkpoints.LLADA2 | changes).items() if value != 'absent'}
        (tmp_path / 'config.json').write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / 'generation_config.json').write_text(json.dumps(generation))
        for name in checkpoints.TOKENIZER_FILES:
            (tmp_path / name).write_bytes((checkpoints.TOKENIZER / name).read_bytes())
        return tmp_path

    return write


@COMMANDS
@WAYS
def test_a_good_checkpoint(command_line, command, way, llada2):
    """Red when LLaDA2 without our options is left to LMDeploy, which does not know it."""
    config = command_line.run(*command, llada2(), *way, *BATCH).config
    assert isinstance(config, FocusEngineConfig)
    assert config.focus is ('--focus' in way)


@COMMANDS
@WAYS
@pytest.mark.parametrize('changes, words', [
    ({'score_function': 'softmax'}, ('score_function', 'softmax', 'sigmoid')), ({'n_group': 'absent'}, ('n_group', )),
], ids=['router', 'missing'])
def test_a_bad_checkpoint(command_line, command, way, changes, words, llada2):
    """Exit status 2 and the field, before anything is loaded. Red when it ends in LMDeploy's own check, which exits
    with 1 and advises to file an issue."""
    message = command_line.refused(*command, llada2(**changes), *way, *BATCH)
    assert all(word in message for word in words), message
