"""What is read from a checkpoint: block length, mask id, config classes and model config."""
import json
import shutil

import pytest
from lmdeploy.hf_configs import config_from_pretrained
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.nn.rotary_embedding import build_rotary_params, get_rope_theta
from transformers import PretrainedConfig

from lmdeploy_focus import activation
from lmdeploy_focus.models.configs import SDARConfig, SDARMoeConfig, mask_token_id, named_block_length


@pytest.fixture(autouse=True)
def registered():
    activation.register()


def model_config(folder, **options):
    return ModelConfig.from_pretrained(str(folder), dtype='float16', device_type='cpu', **options)


@pytest.mark.parametrize('path, length', [
    ('JetLM/SDAR-8B-Chat-b32', 32),
    ('SDAR-8B-Chat-b4', 4),
    ('models/SDAR-8B-Chat-b16/', 16),
    ('/cache/hub/models--JetLM--SDAR-8B-Chat-b64/snapshots/0123abcd', 64),
    ('/cache/hub/models--JetLM--SDAR-8B-Chat-b64/snapshots/0123abcd/', 64),
    ('/runs-b16/model', None),
    ('/cache/hub/models--JetLM--SDAR-1.7B-Chat/snapshots/0123-b32', None),
    ('SDAR-8B-Chat-b32-step100', None),
    ('SDAR-b7', None),
    ('SDAR-b132', None),
    ('SDARb32', None),
    ('', None),
    (None, None),
])
def test_block_length_by_name(path, length):
    """Red when a parent folder, a commit hash or a size is taken for a block length, or a hub's cache is not read."""
    assert named_block_length(path) == length


@pytest.mark.parametrize('name, changes, length', [
    ('SDAR-b16', {}, 32),
    ('SDAR-b16', {'block_size': 8}, 8),
    ('SDAR-b16', {'block_size': 'absent', 'block_length': 64}, 64),
    ('SDAR-b16', {'block_size': None, 'block_length': None}, 16),
    ('SDAR-b16', {'block_size': 'absent'}, 16),
    ('models--JetLM--SDAR-b8/snapshots/0f', {'block_size': 'absent'}, 8),
    ('SDAR', {'block_size': 'absent'}, None),
])
def test_block_length_of_the_model_config(checkpoint, name, changes, length):
    """Red when the order config, then name, is lost. None leaves LMDeploy's own default to LMDeploy."""
    assert model_config(checkpoint(name, **changes)).dllm_block_length == length


@pytest.mark.parametrize('files, mask', [
    ({}, 151669),
    ({'tokenizer_config.json': {'mask_token': '<m>', 'added_tokens_decoder': {'9': {'content': '<m>'}}}}, 9),
    ({'tokenizer_config.json': {'mask_token': {'content': '<m>'}}, 'added_tokens.json': {'<m>': 11}}, 11),
    ({'tokenizer_config.json': {'added_tokens_decoder': {'5': {'content': '<|MASK|>'}}}}, 5),
    ({'tokenizer_config.json': {'mask_token': None}, 'added_tokens.json': {'<|MASK|>': 6}}, 6),
    ({'tokenizer.json': {'added_tokens': [{'id': 7, 'content': '<|MASK|>'}, {'id': 8, 'content': 'x'}]}}, 7),
    ({'tokenizer_config.json': {'mask_token': 'x'},
      'tokenizer.json': {'added_tokens': [{'id': 7, 'content': '<|MASK|>'}, {'id': 8, 'content': 'x'}]}}, 8),
    ({'tokenizer_config.json': {'mask_token': 'unlisted'}}, 151669),
])
def test_mask_id_by_the_tokenizer(tmp_path, files, mask):
    """Red when one of the places where a tokenizer keeps its mask token is not read."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert mask_token_id({'mask_token_id': None}, str(tmp_path)) == mask
    assert mask_token_id({'mask_token_id': 0}, str(tmp_path)) == 0


def test_mask_id_of_the_model_config(checkpoint, demo):
    """Red when LMDeploy's constant is kept for a checkpoint that has another mask token."""
    assert model_config(checkpoint()).dllm_mask_token == 3
    folder = checkpoint('by-tokenizer', mask_token_id='absent')
    shutil.copy(demo / 'sdar/tokenizer_config.json', folder)
    assert model_config(folder).dllm_mask_token == 3
    assert model_config(checkpoint('published', mask_token_id='absent')).dllm_mask_token == 151669


@pytest.mark.parametrize('trust', [False, True])
def test_our_config_class_is_used(demo, trust):
    """Red when the checkpoint's own code is run or asked for."""
    config = config_from_pretrained(str(demo / 'sdar'), trust_remote_code=trust)
    assert type(config) is SDARConfig
    assert config.block_size == 32
    assert config.mask_token_id == 3


@pytest.mark.parametrize('rope', [{'rope_scaling': None, 'rope_theta': 12345.0}, {'rope_theta': 12345},
                                  {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}, 'rope_theta': 12345.0}])
def test_rope_is_readable(checkpoint, rope):
    """Red when `rope_scaling: null` reaches LMDeploy's rotary embedding as None (transformers 5)."""
    folder = checkpoint(**{'rope_scaling': 'absent', **rope})
    config = model_config(folder).hf_config
    assert get_rope_theta(config) == 12345
    factor = 2.0 if rope.get('rope_scaling') else 1.0
    assert build_rotary_params(config).get('scaling_factor', 1.0) == factor


@pytest.mark.parametrize('changes, window', [
    ({'use_sliding_window': False, 'sliding_window': 4096}, None),
    ({'use_sliding_window': 'absent', 'sliding_window': 4096}, None),
    ({'use_sliding_window': False, 'sliding_window': None}, None),
    ({'use_sliding_window': True, 'sliding_window': 128}, 128),
])
def test_an_unused_sliding_window_does_not_reach_attention(checkpoint, changes, window):
    """Red when the stock model, which hands `sliding_window` on as it is, would see a window that is not in use."""
    config = model_config(checkpoint(**changes))
    assert config.hf_config.sliding_window == window
    assert config.sliding_window == (window or -1)


def test_a_generic_config_loses_its_unused_window_too(checkpoint):
    """Red when only our own config class is looked after."""
    folder = checkpoint(sliding_window=4096, use_sliding_window=False)
    generic = PretrainedConfig.from_pretrained(str(folder))
    generic.sliding_window = 4096
    assert ModelConfig.from_hf_config(generic, str(folder), device_type='cpu', dtype='float16').sliding_window == -1
    assert generic.sliding_window is None


def test_sdar_moe(checkpoint):
    """Red when the MoE checkpoints are left to LMDeploy's builder."""
    folder = checkpoint('SDAR-30B-A3B-Chat-b16', model_type='sdar_moe', architectures=['SDARMoeForCausalLM'],
                        block_size='absent', num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = model_config(folder)
    assert type(config.hf_config) is SDARMoeConfig
    assert (config.dllm_block_length, config.dllm_mask_token, config.model_paradigm) == (16, 3, 'dllm')
    assert config.hf_config.num_experts == 4


def test_other_models_keep_lmdeploys_builder(demo):
    """Red when our builder takes models that are not SDAR's."""
    config = model_config(demo / 'ar')
    assert (config.model_paradigm, config.dllm_block_length) == ('ar', None)
