"""What is read of a LLaDA2, SDAR-MoE or SDAR checkpoint, and what is refused of it."""
import json

import pytest
import torch

from lmdeploy_focus.admission import admit, resolve_block_length
from lmdeploy_focus.config import FocusEngineConfig
from lmdeploy_focus.models.configs import MASK_TOKENS

from . import checkpoints
from .conftest import model_of

GATE = 'model.layers.1.mlp.gate.weight'
EXPERT = 'model.layers.1.mlp.experts.3.up_proj.weight'
ATTENTION = {'llada2': 'model.layers.2.attention.query_key_value.weight',
             'sdar_moe': 'model.layers.2.self_attn.k_proj.weight', 'sdar': 'model.layers.2.self_attn.o_proj.weight'}


class Overrides(dict):
    """hf_overrides that can be part of a key."""

    def __hash__(self):
        return hash(repr(self))

    def __lt__(self, other):
        return False


def refused(engine, folder, **options):
    """The error of an engine that must not come up."""
    with pytest.raises(ValueError) as caught:
        engine(folder, **{'dllm_block_length': 32, **options})
    return str(caught.value)


@pytest.mark.parametrize('name, focus', [('llada2', False), ('llada2', True), ('sdar_moe', True), ('sdar', True)])
def test_tensors_that_are_not_the_models(name, focus, engine, tmp_path):
    """Red when a tensor is missing, misshapen or unknown without an error that names it and what was expected."""
    given = checkpoints.weights(name)
    experts = (GATE, EXPERT) if name in checkpoints.CONFIGS else ()
    norm = 'model.layers.3.attention.query_layernorm.weight' if name == 'llada2' else 'model.norm.weight'
    for key in (*experts, ATTENTION[name], norm, 'lm_head.weight'):
        folder = checkpoints.write(tmp_path / f'lacks {key}', name, {k: v for k, v in given.items() if k != key})
        assert f'lacks {key} {list(given[key].shape)};' in refused(engine, folder, focus=focus)
        wrong = checkpoints.write(tmp_path / f'misshapen {key}', name, given | {key: given[key][:-1].contiguous()})
        message = refused(engine, wrong, focus=focus)
        assert f'tensor {key} ' in message
        assert f'is {list(given[key][:-1].shape)}; by config.json it must be {list(given[key].shape)}' in message
    folder = checkpoints.write(tmp_path / 'more', name, given | {'model.layers.4.mlp.gate.weight': torch.ones(8, 64)})
    assert 'tensor model.layers.4.mlp.gate.weight [8, 64] of the checkpoint must not be there' in refused(
        engine, folder, focus=focus)
    fewer = {key: value for key, value in given.items() if '.mlp.' not in key}
    message = refused(engine, checkpoints.write(tmp_path / 'no MLP', name, fewer), focus=focus)
    assert f' and {len(given) - len(fewer) - 3} more' in message


@pytest.mark.parametrize('name', checkpoints.MODELS)
def test_a_sliding_window_in_use(name, engine, tmp_path):
    """Red when focus leaves out a window that the checkpoint uses, or refuses one that it does not use."""
    folder = checkpoints.write(tmp_path / 'model', name, {}, use_sliding_window=True)
    message = refused(engine, folder)
    assert 'sliding_window' in message and '4096' in message and 'use_sliding_window' in message
    folder = checkpoints.write(tmp_path / 'unused', name, {})
    assert 'the checkpoint lacks ' in refused(engine, folder)  # all is well but that there are no tensors


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('length, page, words', [
    (64, 32, 'it must divide the KV page, and --cache-block-seq-len (block_size) is 32'),
    (12, 64, '--dllm-block-length (dllm_block_length), by the checkpoint, is 12; it must be 4, 8, 16, 32 or 64'),
    (128, 64, 'is 128; it must be 4, 8, 16, 32 or 64'),
])
def test_blocks_that_do_not_fit_a_page(name, length, page, words, engine, tmp_path):
    """Red when a block would straddle pages, or a length without a kernel gets to the engine."""
    folder = checkpoints.write(tmp_path / 'model', name, {}, block_size=length)
    assert words in refused(engine, folder, dllm_block_length=None, block_size=page, kernel_block_size=page)


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
    """Red when a router, a bias or a window is silently left out, or told only after the model was loaded; and with
    focus off, when LMDeploy's environment check gets to see the error and ends the process over it."""
    folder = checkpoints.write(tmp_path / 'model', 'llada2', {}, **changes)
    for focus in (True, False):
        assert words in refused(engine, folder, focus=focus)


def test_overridden_fields_are_checked(engine, folders):
    """Red when hf_overrides, which LMDeploy applies after its config builder, escape the checks."""
    for focus in (True, False):
        message = refused(engine, folders['llada2'], focus=focus, hf_overrides=Overrides(n_group=5))
        assert 'n_group of config.json is 5' in message


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
    with pytest.raises(ValueError, match='mask_token_id of .* is missing'):
        admit(str(folder), FocusEngineConfig())


def test_a_mask_token_that_no_file_tells(engine, tmp_path):
    """Red when LLaDA2 without focus runs with another family's mask id, or the error does not reach the caller."""
    folder = checkpoints.write(tmp_path / 'model', 'llada2', {})
    for file in ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json'):
        text = (folder / file).read_text().replace('"mask_token":', '"unused":')
        for token in MASK_TOKENS:
            text = text.replace(token, '<hole>')
        (folder / file).write_text(text)
    assert 'mask_token_id of' in refused(engine, folder, focus=False)


@pytest.mark.parametrize('name', checkpoints.MODELS)
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


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_narrow_dtypes(name, dtype, engine, decode):
    """Red when a part of the model stays in another dtype, or the gate leaves fp32 though the checkpoint wants it."""
    pipe = engine(name, dtype=dtype, dllm_block_length=32)
    tokens, = decode(pipe, ['The'], max_new_tokens=6)
    assert 0 < len(tokens) <= 6
    kinds = {key: value.dtype for key, value in model_of(pipe).named_parameters()}
    gates = {key for key in kinds if key.endswith(('mlp.gate.weight', 'mlp.gate.expert_bias'))}
    assert bool(gates) is (name in checkpoints.CONFIGS)
    wide = gates if name == 'llada2' else set()
    assert {key for key, kind in kinds.items() if kind == torch.float32} == wide
    assert {kind for key, kind in kinds.items() if key not in wide} == {getattr(torch, dtype)}
