"""FP8 checkpoints: each weight and each scale comes to its place, and what cannot be right is refused by name."""
import pytest
import torch
from lmdeploy.pytorch.nn.linear.blocked_fp8 import BlockedF8Linear, QKVBlockedF8Linear
from lmdeploy.pytorch.nn.moe.blocked_fp8 import FusedMoEBlockedF8

from . import checkpoints, fp8
from .conftest import model_of
from .test_checkpoints import Overrides, refused

OPTIONS = {'dllm_block_length': 32, 'dllm_confidence_threshold': 0.6}
PROMPTS = ['The quick brown fox', 'Tom has 3 apples and buys 5 more. ' * 3]
LAYER = 'model.layers.0.mlp.up_proj.weight'  # of a dense layer in each model that has one first
ONE = {'llada2': LAYER, 'sdar': LAYER, 'sdar_moe': 'model.layers.0.mlp.experts.3.up_proj.weight'}


@pytest.fixture(scope='module')
def tensors():
    """Name -> (the FP8 checkpoint, the same in fp32)."""
    return {name: fp8.quantised(checkpoints.weights(name, **fp8.SIZES)) for name in checkpoints.MODELS}


@pytest.fixture
def write(tensors, tmp_path, monkeypatch):
    """Returns a function: name, changes of tensors (None: absent) and of config.json -> folder of an FP8 checkpoint."""
    fp8.install(monkeypatch)

    def make(name, changed=None, **changes):
        given = {key: value for key, value in (tensors[name][0] | (changed or {})).items() if value is not None}
        folder = tmp_path / f'fp8-{len(list(tmp_path.iterdir()))}'
        return checkpoints.write(folder, name, given, **{**fp8.SIZES, 'quantization_config': fp8.QUANTISATION,
                                                         **changes})

    return make


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('focus', [False, True])
def test_decodes_like_the_dequantised_checkpoint(name, focus, engine, decode, write, tensors, tmp_path):
    """Red when a layer is left out of the quantisation, a scale lands at another block (a part of LLaDA2's fused QKV
    product, an expert), or LLaDA2's router is quantised."""
    options = {**OPTIONS, 'focus': focus, 'num_gpu_blocks': 16}
    plain = checkpoints.write(tmp_path / 'plain', name, tensors[name][1], **fp8.SIZES)
    expected = decode(engine(plain, **options), PROMPTS, max_new_tokens=24)
    pipe = engine(write(name), **options)
    assert decode(pipe, PROMPTS, max_new_tokens=24) == expected
    model = model_of(pipe)
    for layer in model.model.layers:
        assert type(layer.self_attn.qkv_proj) is QKVBlockedF8Linear
        assert type(layer.self_attn.o_proj) is BlockedF8Linear
    experts = [part for part in model.modules() if isinstance(part, FusedMoEBlockedF8)]
    assert len(experts) == (3 if name in checkpoints.CONFIGS else 0)
    narrow = {key.rpartition('.')[2] for key, value in model.named_parameters() if value.dtype == fp8.FP8}
    assert narrow == {'weight'}
    gates = [value for key, value in model.named_parameters() if '.gate.' in key]
    assert all(gate.dtype == torch.float32 for gate in gates) and len(gates) == {'llada2': 6, 'sdar_moe': 3,
                                                                                'sdar': 0}[name]


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('patched', [False, True])
def test_weights_that_are_not_fp8_yet(name, patched, engine, write, tensors):
    """LMDeploy's `model_format='fp8'` (`patched`), and FP8 checkpoints with layers left out: quantised while loaded.

    Red when the rows of LLaDA2's fused QKV product are taken for scales, or a part of them lands elsewhere.
    """
    original = checkpoints.weights(name, **fp8.SIZES)
    without = {key: None for key in tensors[name][0] if key.endswith('_scale_inv')}
    changes = {'quantization_config': 'absent'} if patched else {}
    options = {'hf_overrides': Overrides(quantization_config=fp8.QUANTISATION | {'lmdeploy_patched': True})}
    folder = write(name, original | without, **changes)
    model = model_of(engine(folder, **OPTIONS, num_gpu_blocks=16, **(options if patched else {})))
    for index, layer in enumerate(model.model.layers):
        prefix = f'model.layers.{index}.'
        if name == 'llada2':
            rows = original[f'{prefix}attention.query_key_value.weight']
        else:
            rows = torch.cat([original[f'{prefix}self_attn.{part}_proj.weight'] for part in 'qkv'])
        loaded = layer.self_attn.qkv_proj
        torch.testing.assert_close(fp8.dequantised(loaded.weight, loaded.weight_scale_inv), rows.float(), rtol=0.07,
                                   atol=1e-3)


@pytest.mark.parametrize('name', checkpoints.MODELS)
def test_scales_that_do_not_fit(name, engine, write, tensors):
    """Red when a weight in FP8 is run without its scale, a scale with a weight that is none, or the error does not name
    the tensor and its shape."""
    scale, given = f'{ONE[name]}_scale_inv', tensors[name][0]
    shape = list(given[scale].shape)
    assert f'the checkpoint lacks {scale} {shape}; its weights in FP8 must have them' in refused(
        engine, write(name, {scale: None}))
    assert f'the checkpoint has {scale} {shape}, which must belong to weights in FP8' in refused(
        engine, write(name, {ONE[name]: given[ONE[name]].bfloat16()}))
    assert f'tensor {scale} of the checkpoint is [9, 2]; by config.json it must be {shape}' in refused(
        engine, write(name, {scale: torch.ones(9, 2)}))
    assert f'lacks {ONE[name]} ' in refused(engine, write(name, {ONE[name]: None}))
    assert 'tensor lm_head.weight of the checkpoint is torch.float8_e4m3fn; it must not be quantised' in refused(
        engine, write(name, {'lm_head.weight': given['lm_head.weight'].to(fp8.FP8)}))


@pytest.mark.parametrize('name', checkpoints.CONFIGS)
def test_a_quantised_router(name, engine, write, tensors):
    """Red when a router's rows in FP8 are cast without their scale."""
    gate = 'model.layers.1.mlp.gate.weight'
    assert f'tensor {gate} of the checkpoint is torch.float8_e4m3fn' in refused(
        engine, write(name, {gate: tensors[name][0][gate].to(fp8.FP8)}))


@pytest.mark.parametrize('focus', [False, True])
@pytest.mark.parametrize('changes, words', [
    ({'quantization_config': {'quant_method': 'awq', 'bits': 4}}, "has quant_method 'awq'"),
    ({'quantization_config': {'quant_method': 'fp8', 'activation_scheme': 'static'}},
     "quant_method 'fp8' and weight_block_size None; with LLaDA2 they must be 'fp8' and [128, 128]"),
    ({'quantization_config': fp8.QUANTISATION | {'weight_block_size': [64, 64]}}, 'weight_block_size [64, 64]'),
    ({'head_dim': 64, 'num_attention_heads': 4}, 'head_dim of config.json is 64; with FP8 weights'),
])
def test_what_llada2_does_not_read(focus, changes, words, engine, write):
    """Red when a fused QKV product is cut where its scales are not, or another quantisation gives wrong weights."""
    assert words in refused(engine, write('llada2', **changes), focus=focus)
