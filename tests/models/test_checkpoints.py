"""What is read of a LLaDA2 or SDAR-MoE checkpoint, and what is refused of it."""
import json

import pytest
import torch

from lmdeploy_focus.admission import admit, resolve_block_length
from lmdeploy_focus.config import FocusEngineConfig

from . import checkpoints
from .conftest import model_of

GATE = 'model.layers.1.mlp.gate.weight'
EXPERT = 'model.layers.1.mlp.experts.3.up_proj.weight'
ATTENTION = {'llada2': 'model.layers.2.attention.query_key_value.weight',
             'sdar_moe': 'model.layers.2.self_attn.k_proj.weight'}


class Overrides(dict):
    """hf_overrides that can be part of a key."""

    def __hash__(self):
        return hash(tuple(self.items()))

    def __lt__(self, other):
        return False


def refused(engine, folder, **options):
    """The error of an engine that must not come up."""
    with pytest.raises(ValueError) as caught:
        engine(folder, **{'dllm_block_length': 32, **options})
    return str(caught.value)


@pytest.mark.parametrize('name, focus', [('llada2', False), ('llada2', True), ('sdar_moe', True)])
def test_tensors_that_are_not_the_models(name, focus, engine, tmp_path):
    """Red when a tensor is missing, misshapen or unknown without an error that names it and what was expected."""
    given = checkpoints.weights(name)
    for key in (GATE, EXPERT, ATTENTION[name], 'lm_head.weight'):
        folder = checkpoints.write(tmp_path / f'lacks {key}', name, {k: v for k, v in given.items() if k != key})
        assert f'lacks {key} {list(given[key].shape)};' in refused(engine, folder, focus=focus)
        wrong = checkpoints.write(tmp_path / f'misshapen {key}', name, given | {key: given[key][:-1].contiguous()})
        message = refused(engine, wrong, focus=focus)
        assert f'tensor {key} ' in message
        assert f'is {list(given[key][:-1].shape)}; by config.json it must be {list(given[key].shape)}' in message
    folder = checkpoints.write(tmp_path / 'more', name, given | {'model.layers.4.mlp.gate.weight': given[GATE].clone()})
    assert 'tensor model.layers.4.mlp.gate.weight [' in refused(engine, folder, focus=focus)
    fewer = {key: value for key, value in given.items() if '.experts.' not in key}
    message = refused(engine, checkpoints.write(tmp_path / 'no experts', name, fewer), focus=focus)
    count = sum('.experts.' in key for key in given)
    assert f' and {count - 3} more' in message


def test_dense_sdar_is_checked_too(engine, tmp_path):
    """Red when the common part leaves out the dense model."""
    import shutil

    from safetensors.torch import load_file, save_file
    shutil.copytree(checkpoints.TOKENIZER, tmp_path / 'sdar')
    tensors = load_file(tmp_path / 'sdar/model.safetensors')
    gone = tensors.pop('model.layers.3.self_attn.q_norm.weight')
    save_file(tensors, tmp_path / 'sdar/model.safetensors')
    message = refused(engine, tmp_path / 'sdar')
    assert f'lacks model.layers.3.self_attn.q_norm.weight {list(gone.shape)};' in message


@pytest.mark.parametrize('changes, words', [
    ({'score_function': 'softmax'}, "score_function of config.json is 'softmax'; with LLaDA2 it must be 'sigmoid'"),
    ({'score_function': 'absent'}, "score_function of config.json is None; with LLaDA2 it must be 'sigmoid'"),
    ({'router_dtype': 'bf16'}, "router_dtype of config.json is 'bf16'"),
    ({'moe_router_enable_expert_bias': False}, 'moe_router_enable_expert_bias of config.json is False'),
    ({'norm_topk_prob': False}, 'norm_topk_prob of config.json is False'),
    ({'moe_router_capacity': 2}, 'moe_router_capacity of config.json is 2; it must be absent'),
    ({'n_group': 3}, 'n_group of config.json is 3; with LLaDA2 it must be a divisor of num_experts, 16'),
    ({'n_group': 'absent'}, 'n_group of config.json is missing'),
    ({'topk_group': 5}, 'topk_group of config.json is 5'),
    ({'topk_group': 0}, 'topk_group of config.json is 0'),
    ({'num_experts_per_tok': 9}, 'num_experts_per_tok of config.json is 9'),
    ({'num_experts': 'absent'}, 'num_experts of config.json is missing'),
    ({'rope_theta': 'absent'}, 'rope_theta of config.json is missing'),
    ({'partial_rotary_factor': 'absent'}, 'partial_rotary_factor of config.json is missing'),
    ({'use_qkv_bias': True}, 'use_qkv_bias of config.json is True'),
    ({'use_qk_norm': False}, 'use_qk_norm of config.json is False'),
    ({'hidden_act': 'gelu'}, "hidden_act of config.json is 'gelu'"),
    ({'use_sliding_window': True}, 'sliding_window'),
])
def test_fields_that_the_model_does_not_compute(changes, words, engine, tmp_path):
    """Red when a router, a bias or a window is silently left out, or told only after the model was loaded.

    With focus off the config builder refuses it; LMDeploy's environment check turns what that raises into a log line
    and exit status 1.
    """
    from lmdeploy.pytorch.config import ModelConfig
    folder = checkpoints.write(tmp_path / 'model', 'llada2', {}, **changes)
    assert words in refused(engine, folder)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_pretrained(str(folder), dtype='float16', device_type='cpu')
    assert words in str(caught.value)


def test_overridden_fields_are_checked(engine, folders):
    """Red when hf_overrides, which LMDeploy applies after its config builder, escape the checks."""
    assert 'n_group of config.json is 5' in refused(engine, folders['llada2'], hf_overrides=Overrides(n_group=5))


def test_a_router_field_that_sdar_moe_does_not_know(engine, tmp_path):
    """Red when a checkpoint with another router is run with this one."""
    folder = checkpoints.write(tmp_path / 'model', 'sdar_moe', {}, score_function='sigmoid')
    assert "score_function of config.json is 'sigmoid'; it must be absent" in refused(engine, folder)


def test_block_length_and_mask_token_of_llada2(folders, tmp_path):
    """Red when the family's block length is lost, or the published mask id is taken without the checkpoint's word."""
    from lmdeploy.pytorch.config import ModelConfig
    model_config = ModelConfig.from_pretrained(str(folders['llada2']), dtype='float16', device_type='cpu')
    assert (model_config.dllm_mask_token, model_config.dllm_block_length) == (3, 32)
    assert model_config.model_paradigm == 'dllm'
    assert (model_config.sliding_window, model_config.hf_config.sliding_window) == (-1, None)
    assert resolve_block_length(str(folders['llada2']), FocusEngineConfig()) == 32
    assert resolve_block_length(str(folders['llada2']), FocusEngineConfig(dllm_block_length=16)) == 16

    folder = checkpoints.write(tmp_path / 'LLaDA2-b8', 'llada2', {})
    (folder / 'tokenizer.json').unlink()
    (folder / 'tokenizer_config.json').write_text(json.dumps({'added_tokens_decoder': {'9': {'content': '<|mask|>'}}}))
    model_config = ModelConfig.from_pretrained(str(folder), dtype='float16', device_type='cpu')
    assert (model_config.dllm_mask_token, model_config.dllm_block_length) == (9, 8)

    (folder / 'tokenizer_config.json').unlink()
    for read in (lambda: ModelConfig.from_pretrained(str(folder), dtype='float16', device_type='cpu'),
                 lambda: admit(str(folder), FocusEngineConfig())):
        with pytest.raises(ValueError, match='mask_token_id of .* is missing'):
            read()


@pytest.mark.parametrize('name', ['llada2', 'sdar_moe'])
def test_remote_code_is_never_asked_for(name, folders):
    """Red when the checkpoint's `auto_map`, whose modules are not there, is followed."""
    from lmdeploy.hf_configs import config_from_pretrained
    for trust in (False, True):
        config = config_from_pretrained(str(folders[name]), trust_remote_code=trust)
        assert type(config).__module__.startswith('lmdeploy_focus.models.')


@pytest.mark.parametrize('focus', [False, True])
def test_chat_template_and_stop_tokens_are_the_checkpoints(focus, engine, tmp_path):
    """Red when LMDeploy takes another template, or a stop token is not in generation_config.json or the tokenizer."""
    from lmdeploy import GenerationConfig
    folder = checkpoints.write(tmp_path / 'model', 'llada2')
    template = ("{%- for message in messages %}{{- '<role>' + message['role'] + '</role>' + message['content'] }}"
                '{%- endfor %}')
    (folder / 'chat_template.jinja').write_text(template)
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    (folder / 'tokenizer_config.json').write_text(json.dumps(config | {'chat_template': template}))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [7, 2]}))
    served = engine(folder, focus=focus).async_engine
    assert served.chat_template.messages2prompt([{'role': 'user', 'content': 'Hi'}]) == '<role>user</role>Hi'
    seen = served._determine_gen_config([1], gen_config=GenerationConfig(max_new_tokens=4))
    assert set(seen.stop_token_ids) == {7, 2}


@pytest.mark.parametrize('name', ['llada2', 'sdar_moe'])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_narrow_dtypes(name, dtype, engine, decode):
    """Red when a part of the model stays in another dtype, or the gate leaves fp32 though the checkpoint wants it."""
    pipe = engine(name, dtype=dtype, dllm_block_length=32)
    tokens, = decode(pipe, ['The'], max_new_tokens=6)
    assert 0 < len(tokens) <= 6
    kinds = {key: value.dtype for key, value in model_of(pipe).named_parameters()}
    gates = {key for key in kinds if key.endswith(('mlp.gate.weight', 'mlp.gate.expert_bias'))}
    assert gates
    wide = gates if name == 'llada2' else set()
    assert {key for key, kind in kinds.items() if kind == torch.float32} == wide
    assert {kind for key, kind in kinds.items() if key not in wide} == {getattr(torch, dtype)}
