"""LLaDA2.1 checkpoints: decoded as LLaDA2.0's; what asks for token editing is refused."""
import json

import pytest

from lmdeploy_focus.admission import admit
from lmdeploy_focus.config import FocusEngineConfig
from lmdeploy_focus.models.configs import check_fields

from . import checkpoints
from .test_checkpoints import Overrides, refused

OPTIONS = {'dllm_block_length': 32, 'dllm_confidence_threshold': 0.6}


def written(folder, generation, **changes):
    """A LLaDA2 checkpoint with these fields in generation_config.json and those in config.json."""
    checkpoints.write(folder, 'llada2', **changes)
    file = folder / 'generation_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return folder


@pytest.mark.parametrize('focus', [False, True])
@pytest.mark.parametrize('generation, changes, words', [
    ({}, {'editing_threshold': 0.5}, 'editing_threshold of config.json is 0.5; it must be absent or null'),
    ({'editing_threshold': 0.0}, {}, 'editing_threshold of generation_config.json is 0.0'),
    ({'edit_threshold': 0.9, 'max_post_edit_steps': 0}, {}, 'edit_threshold of generation_config.json is 0.9'),
    ({'max_post_steps': 16}, {}, 'max_post_steps of generation_config.json is 16'),
    ({}, {'token_editing': True}, 'token_editing of config.json is True'),
])
def test_editing_is_refused(focus, generation, changes, words, engine, tmp_path):
    """Red when a checkpoint that asks for token editing is decoded without, or the error does not name the field."""
    folder = written(tmp_path / 'model', generation, **changes)
    assert words in refused(engine, folder, focus=focus)
    with pytest.raises(ValueError) as caught:  # what a repository's name or folder tells before anything is built
        check_fields(checkpoints.LLADA2 | changes, str(folder))
    assert words in str(caught.value)


def test_editing_is_refused_before_anything_is_built(tmp_path):
    """Red when the options' check, which comes first, passes a config.json over."""
    folder = written(tmp_path / 'model', {}, editing_threshold=0.5)
    with pytest.raises(ValueError, match='editing_threshold of config.json'):
        admit(str(folder), FocusEngineConfig(**OPTIONS))


@pytest.mark.parametrize('focus', [False, True])
@pytest.mark.parametrize('generation, changes, options', [
    ({'temperature': 0.0, 'editing_threshold': None, 'max_post_steps': 0}, {'token_editing': False}, {}),
    ({'editing_threshold': 0.5}, {'token_editing': True},
     {'hf_overrides': Overrides(editing_threshold=None, token_editing=False)}),
])
def test_plain_decoding(focus, generation, changes, options, engine, decode, tmp_path):
    """Red when a LLaDA2.1 checkpoint that does not edit, or is told not to, decodes unlike one of LLaDA2.0."""
    prompts = ['The quick brown fox', 'Tom has 3 apples']
    plain = decode(engine('llada2', focus=focus, **OPTIONS), prompts, max_new_tokens=12)
    folder = written(tmp_path / 'LLaDA2.1-mini', generation, **changes)
    assert decode(engine(folder, focus=focus, **OPTIONS, **options), prompts, max_new_tokens=12) == plain
    assert all(plain)
