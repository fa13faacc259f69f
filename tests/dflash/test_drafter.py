"""Reading a drafter's config.json, of both generations, and its tensors."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmdeploy_focus.dflash.checkpoint import check_tensors, read_shapes, tensor_shapes
from lmdeploy_focus.dflash.drafter import FULL, SLIDING, parse_drafter, read_drafter

# As published with the paper, and as revised later.
FIRST = {'architectures': ['DFlashDraftModel'], 'model_type': 'qwen3', 'block_size': 16, 'num_target_layers': 36,
         'dflash_config': {'mask_token_id': 151669, 'target_layer_ids': [1, 9, 17, 25, 33]}, 'num_hidden_layers': 5,
         'hidden_size': 2560, 'intermediate_size': 9728, 'num_attention_heads': 32, 'num_key_value_heads': 8,
         'head_dim': 128, 'vocab_size': 151936, 'rope_theta': 1000000, 'rope_scaling': None, 'torch_dtype': 'bfloat16'}
SECOND = {**FIRST, 'block_size': None, 'dtype': 'bfloat16', 'rope_theta': None, 'torch_dtype': None,
          'rope_parameters': {'rope_theta': 1000000, 'rope_type': 'default'},
          'layer_types': [SLIDING] * 4 + [FULL], 'use_sliding_window': True, 'sliding_window': 2048,
          'dflash_config': {**FIRST['dflash_config'], 'block_size': 16}}


def changed(config, **changes):
    """A copy with changes; those of DFlash's fields go into `dflash_config`."""
    inner = {key: changes.pop(key) for key in ('mask_token_id', 'target_layer_ids', 'causal') if key in changes}
    return {**config, 'dflash_config': {**config['dflash_config'], **inner}, **changes}


def test_both_generations():
    """Red when a field is looked for in one place only, or absent `layer_types` are an error."""
    first, second = parse_drafter(FIRST, 'x'), parse_drafter(SECOND, 'x')
    for drafter in (first, second):
        assert (drafter.block_size, drafter.mask_token_id, drafter.dtype) == (16, 151669, 'bfloat16')
        assert drafter.layers_of(36) == (1, 9, 17, 25, 33)
    assert (first.layer_types, first.sliding_window) == ((FULL, ) * 5, None)
    assert (second.layer_types, second.sliding_window) == ((SLIDING, ) * 4 + (FULL, ), 2048)


@pytest.mark.parametrize('changes,types,window', [
    ({'sliding_window': 64, 'use_sliding_window': False}, [FULL] * 5, None),
    ({'sliding_window': 64, 'use_sliding_window': True, 'max_window_layers': 3}, [FULL] * 3 + [SLIDING] * 2, 64),
    ({'sliding_window': 64, 'use_sliding_window': True, 'max_window_layers': 5}, [FULL] * 5, None),
])
def test_layers_without_a_list(changes, types, window):
    """Red when absent `layer_types` are not filled in as transformers does."""
    drafter = parse_drafter(changed(FIRST, **changes), 'x')
    assert (list(drafter.layer_types), drafter.sliding_window) == (types, window)


@pytest.mark.parametrize('changes,causal', [({}, None), ({'causal': True}, True), ({'is_causal': False}, False)])
def test_causal_of_either_spelling(changes, causal):
    """Red when one of the two spellings is passed over."""
    assert parse_drafter(changed(SECOND, **changes), 'x').causal is causal


def test_default_layers_are_spread_evenly():
    """Red when a config without `target_layer_ids` is refused, or gets other layers than LMDeploy's."""
    drafter = parse_drafter(changed(FIRST, target_layer_ids=None), 'x')
    assert drafter.layers_of(36) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize('field,value', [
    ('block_size', None), ('block_size', 1), ('block_size', '16'), ('mask_token_id', None), ('mask_token_id', -1),
    ('target_layer_ids', []), ('target_layer_ids', [9, 1]), ('target_layer_ids', [1, 1]), ('target_layer_ids', 5),
    ('num_hidden_layers', 0), ('hidden_size', None), ('layer_types', [FULL] * 4), ('layer_types', ['linear'] * 5),
    ('causal', 'no'), ('selector_rank', 256), ('attention_sink_bias', True),
    ('quantization_config', {'bits': 4}),
])
def test_a_wrong_field_is_named(field, value):
    """Red when a config that cannot be run is taken, or the message does not name the field and its value."""
    with pytest.raises(ValueError, match=f'{field} of hub/name') as refused:
        parse_drafter(changed(FIRST, **{field: value}), 'hub/name')
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize('window', [{}, {'sliding_window': 0}, {'sliding_window': 64, 'use_sliding_window': False}])
def test_a_sliding_layer_without_a_window(window):
    """Red when a layer that needs a window gets none in use."""
    with pytest.raises(ValueError, match='sliding_window of x'):
        parse_drafter(changed(FIRST, layer_types=[SLIDING] * 5, **window), 'x')


@pytest.mark.parametrize('config', [{'architectures': ['Qwen3ForCausalLM']}, {**FIRST, 'dflash_config': None}])
def test_another_kind_of_model(config):
    """Red when a model that is no drafter is taken for one."""
    with pytest.raises(ValueError, match='--dflash .*DFlashDraftModel'):
        parse_drafter(config, 'x')


def test_two_values_for_one_field():
    """Red when one of two contradicting values is taken."""
    with pytest.raises(ValueError, match='block_size of x is 8.*dflash_config, 16'):
        parse_drafter({**SECOND, 'block_size': 8}, 'x')


def test_unreadable_config(tmp_path):
    """Red when a folder without a config, or with a broken one, is not named."""
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken' / 'config.json').write_text('{"architectures": ')
    (tmp_path / 'empty').mkdir()
    for folder in ('broken', 'empty'):
        with pytest.raises(ValueError, match=f'--dflash .*{folder}.*config.json'):
            read_drafter(str(tmp_path / folder))


def test_tensors_of_the_demo_drafter(demo):
    """Red when the expected tensors are not those of a real drafter."""
    drafter = read_drafter(str(demo / 'dflash'))
    check_tensors(read_shapes(str(demo / 'dflash')), tensor_shapes(drafter, 256, 3), 'demo')
    biased = parse_drafter({**json.loads((demo / 'dflash/config.json').read_text()), 'attention_bias': True}, 'x')
    assert set(tensor_shapes(biased, 256, 3)) - set(tensor_shapes(drafter, 256, 3)) == {
        f'layers.{layer}.self_attn.{name}_proj.bias' for layer in range(3) for name in 'qkvo'}


@pytest.mark.parametrize('change,message', [
    (lambda t: t | {'selector.weight': torch.zeros(4, 2)}, r'tensor selector.weight \[4, 2\] .* must not be there'),
    (lambda t: {k: v for k, v in t.items() if k != 'fc.weight'}, 'lacks the tensor fc.weight'),
    (lambda t: t | {'fc.weight': torch.zeros(256, 512)}, r'fc.weight .* is \[256, 512\].*must be \[256, 768\]'),
    (lambda t: t | {'mask_embedding.weight': torch.zeros(3)}, r'mask_embedding.weight .* is \[3\]'),
])
def test_a_wrong_tensor_is_named(drafter, change, message):
    """Red when a checkpoint with a tensor too many, too few or of another shape is not refused by its name."""
    folder = drafter()
    file = folder / 'model.safetensors'
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=message):
        check_tensors(read_shapes(str(folder)), tensor_shapes(read_drafter(str(folder)), 256, 3), str(folder))


def test_names_with_a_prefix_and_copies_of_the_targets(drafter):
    """Red when published spellings of the names, or copies of the target's embedding and head, are refused."""
    folder = drafter()
    file = folder / 'model.safetensors'
    tensors = {f'model.{name}': tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {'embed_tokens.weight': torch.zeros(4096, 256), 'lm_head.weight': torch.zeros(4096, 256)}, file)
    check_tensors(read_shapes(str(folder)), tensor_shapes(read_drafter(str(folder)), 256, 3), str(folder))


@pytest.mark.parametrize('damage', ['cut', 'text', 'gone', 'index'])
def test_a_damaged_file_is_named(drafter, damage):
    """Red when a file that cannot be loaded is noticed only after the engine has started."""
    folder = drafter()
    file = folder / 'model.safetensors'
    if damage == 'cut':
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == 'text':
        file.write_text('version https://git-lfs.github.com/spec/v1')
    elif damage == 'gone':
        file.unlink()
    else:
        (folder / 'model.safetensors.index.json').write_text('{}')
    with pytest.raises(ValueError, match='model.safetensors'):
        read_shapes(str(folder))
