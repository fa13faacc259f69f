"""The drafter's network against the plain torch one of `eval/demo_models/network.py`, with random weights."""
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmdeploy_focus.dflash.drafter import FULL, SLIDING

BLOCK, PAGE, MASK_TOKEN = 6, 16, 3
LENGTHS = [21, 5, 16]
TARGET_LAYERS = [0, 2]


@pytest.fixture
def checkpoints(tmp_path):
    """Returns a function: changes to the drafter's config -> the drafter's folder and the plain network."""
    from eval.demo_models.checkpoint import load_draft, save_ar, save_draft
    from eval.demo_models.network import Decoder, Draft, Shape
    torch.manual_seed(0)
    shape = Shape(vocabulary=96, hidden=64, layers=3, heads=4, kv_heads=2, head_size=16, intermediate=80)
    save_ar(Decoder(Shape(**vars(shape) | {'layers': 4})), tmp_path / 'target')
    draft = Draft(shape, TARGET_LAYERS, BLOCK)
    for parameter in draft.parameters():
        # Larger than at the start of a training, and norms that are not all ones.
        parameter.data += torch.randn_like(parameter) * 0.2
    folder = tmp_path / 'draft'
    save_draft(draft, folder, target_layers=4)

    def write(**changes):
        plain = load_draft(folder)
        config = json.loads((folder / 'config.json').read_text()) | changes
        (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if v != 'absent'}))
        return folder, plain

    return write


def build(folder):
    """Our network of a drafter, on the CPU in fp32, with a random embedding."""
    from lmdeploy.pytorch.config import CacheConfig, DistConfig
    from lmdeploy.pytorch.distributed import DistContext, get_dist_manager
    from lmdeploy.pytorch.model_inputs import BuildModelContext
    from lmdeploy.pytorch.models.patch import build_patched_model
    from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

    from lmdeploy_focus import DFlashConfig, FocusEngineConfig
    from lmdeploy_focus.cpu.scope import cpu_scope
    from lmdeploy_focus.dflash import specdecode
    from lmdeploy_focus.dflash.targets import DFlashBuildContext
    cache = CacheConfig(max_batches=4, block_size=PAGE, kernel_block_size=PAGE, num_cpu_blocks=0, num_gpu_blocks=16,
                        device_type='cpu')
    config = specdecode.build(str(folder.with_name('target')), DFlashConfig(str(folder)),
                              FocusEngineConfig(focus=False, device_type='cpu', dtype='float32'), cache, DistConfig())
    context = DFlashBuildContext(config.target_layer_ids, config.mask_token_id)
    with cpu_scope(), get_dist_manager().context(DistContext.build()), torch.inference_mode():
        model = build_patched_model(config.model_config, device='cpu',
                                    build_model_ctx=BuildModelContext(spec_model_ctx=context))
        load_model_weights(model, str(folder), device='cpu')
    model.set_input_embeddings(nn.Embedding(96, 64).requires_grad_(False))
    return model


def run_ours(model, features, block):
    """Hidden states [S, BLOCK, H] after the context of each sequence, of paged attention."""
    from lmdeploy_focus.cpu.attention import CpuAttentionMetadata
    from lmdeploy_focus.cpu.scope import cpu_scope
    pages = torch.tensor([[5, 2], [1, 0], [7, 3]])
    # as the engine has them: a layer's keys and values are views of one buffer
    pool = torch.full((len(model.layers), 2, 8, PAGE, 2, 16), torch.nan)
    caches = [tuple(layer) for layer in pool]

    def metadata(q_lens, kv_lens):
        q_lens = torch.tensor(q_lens)
        return CpuAttentionMetadata.from_step_context(
            SimpleNamespace(q_seqlens=q_lens, kv_seqlens=torch.tensor(kv_lens), block_offsets=pages, is_decoding=False,
                            q_start_loc=q_lens.cumsum(0) - q_lens, kv_quant_policy=0,
                            cache_config=SimpleNamespace(kernel_block_size=PAGE)))

    with cpu_scope(), torch.inference_mode():
        context = metadata(LENGTHS, LENGTHS)
        model.precompute_and_store_context_kv(torch.cat(features), context.positions, caches, context)
        query = metadata([BLOCK] * 3, [length + BLOCK for length in LENGTHS])
        hidden = model(block.view(1, -1), query.positions[None], caches, query)
    return hidden.view(3, BLOCK, -1)


@torch.inference_mode()
def run_plain(plain, embedding, features, block, types, window, causal):
    """The same by the plain network, one sequence and one layer after another."""
    from eval.demo_models.network import rope_table
    cos, sin = rope_table(64, 16, 10000.0, 'cpu')
    out = []
    for length, rows, ids in zip(LENGTHS, features, block, strict=True):
        rope = cos[None, :length], sin[None, :length]
        block_rope = cos[None, length:length + BLOCK], sin[None, length:length + BLOCK]
        x, context = embedding(ids)[None], plain.context(list(rows[None].chunk(2, -1)))
        key, query = torch.arange(length + BLOCK)[None], torch.arange(length, length + BLOCK)[:, None]
        for layer, kind in zip(plain.layers, types, strict=True):
            sliding = kind == SLIDING
            seen = key <= query if (sliding if causal is None else causal) else torch.ones_like(key <= query)
            if sliding:
                seen = seen & (key > query - window)
            x = layer(x, context, block_rope, rope, seen[None, None])
        out.append(plain.norm(x)[0])
    return torch.stack(out)


@pytest.mark.parametrize('types,causal', [
    ('absent', None),
    ([FULL] * 3, None),
    ([FULL] * 3, True),
    ([SLIDING, FULL, SLIDING], None),
    ([SLIDING, FULL, SLIDING], False),
])
def test_forward_is_the_plain_networks(checkpoints, types, causal):
    """Red when the context sees a norm, a shift or a rope too many, a layer gets another's keys, a window or the causal
    rule is another, or the block's keys lie in another place than its rows."""
    window = 7
    config = {'layer_types': types}
    if SLIDING in types:
        config |= {'use_sliding_window': True, 'sliding_window': window}
    folder, plain = checkpoints(**config | ({} if causal is None else {'is_causal': causal}))
    model = build(folder)
    features = [torch.randn(length, 128) for length in LENGTHS]
    block = torch.randint(4, 96, (3, BLOCK))
    block[:, 1:] = MASK_TOKEN
    ours = run_ours(model, features, block)
    listed = [FULL] * 3 if types == 'absent' else types
    expected = run_plain(plain, model.get_input_embeddings(), features, block, listed, window, causal)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def test_a_mask_embedding_of_its_own(checkpoints):
    """Red when a drafter that has learned the mask's embedding gets the target's."""
    from safetensors.torch import load_file, save_file
    folder, plain = checkpoints()
    mask = torch.randn(64).bfloat16()
    save_file(load_file(folder / 'model.safetensors') | {'mask_embedding.weight': mask}, folder / 'model.safetensors')
    model = build(folder)
    features, block = [torch.randn(length, 128) for length in LENGTHS], torch.full((3, BLOCK), MASK_TOKEN)
    block[:, 0] = 50
    embedding = nn.Embedding.from_pretrained(model.get_input_embeddings().weight.clone())
    embedding.weight.data[MASK_TOKEN] = mask.float()
    expected = run_plain(plain, embedding, features, block, [FULL] * 3, None, None)
    torch.testing.assert_close(run_ours(model, features, block), expected, rtol=2e-5, atol=2e-5)


def test_one_product_projects_the_context_of_all_layers(checkpoints, monkeypatch):
    """Red when the context is projected layer by layer, or its queries are computed."""
    from lmdeploy_focus.dflash import network
    model = build(checkpoints()[0])
    products = []
    linear = network.F.linear
    monkeypatch.setattr(network.F, 'linear', lambda x, w, b=None: products.append(tuple(w.shape)) or linear(x, w, b))
    model.project_context(torch.randn(9, 128))
    # fc, then keys and values of three layers with two heads of 16
    assert products == [(64, 128), (3 * 2 * 2 * 16, 64)]


def test_rope_of_either_generation(checkpoints):
    """Red when `rope_parameters` are not read as `rope_theta` is."""
    folder, _ = checkpoints(rope_theta=500000.0)
    expected = build(folder).rotary_emb(torch.zeros(1, 9, 64), torch.arange(9)[None])
    config = json.loads((folder / 'config.json').read_text())
    del config['rope_theta'], config['rope_scaling']
    config['rope_parameters'] = {'rope_theta': 500000.0, 'rope_type': 'default'}
    (folder / 'config.json').write_text(json.dumps(config))
    got = build(folder).rotary_emb(torch.zeros(1, 9, 64), torch.arange(9)[None])
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize('drafter,target,refused', [('bfloat16', 'float16', True), ('bfloat16', 'float32', False),
                                                    ('float16', 'bfloat16', False), (None, 'float16', False)])
def test_casts(drafter, target, refused):
    """Red when a bf16 drafter is cast to fp16, where it overflows, or a safe cast is refused."""
    from lmdeploy_focus.dflash.specdecode import check_cast
    if not refused:
        check_cast('x', drafter, target)
        return
    with pytest.raises(ValueError, match='dtype of x is bfloat16.*--dtype'):
        check_cast('x', drafter, target)
