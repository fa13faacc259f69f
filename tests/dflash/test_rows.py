"""The GPU's side of attention and of the context, on a CPU with the kernels' twins; see also tests/kernels."""
from dataclasses import replace

import pytest
import torch
from lmdeploy_focus.kernels.dispatch import kernels_for

from lmdeploy_focus.dflash.rows import DecodeRows, stacked, write_slots

from .. import oracle

LENGTHS, ROWS, PAGE, GROUP = [21, 6, 64], 6, 16, 2


def spec(**changes):
    """Of a layer with 4 heads of 16, 2 of them to a key head."""
    from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
    return PagedAttentionBuildSpec(**{'num_heads': 4, 'head_dim': 16, 'scale': 0.3, 'num_kv_heads': 2, 'v_head_dim': 16,
                                      'alibi': False, 'sliding_window': None, 'logit_softcapping': 0.0, 'causal': True,
                                      'use_flash_mla': False, 'mla_index_topk': None, 'learnable_sink': False,
                                      'block_sparse_size': 1} | changes)


def metadata():
    """A decode step of sequences whose pages lie in any order."""
    from lmdeploy.pytorch.backends.cuda.attention import TritonAttentionMetadata
    table = torch.tensor([[5, 2, 0, 0], [1, 0, 0, 0], [7, 3, 6, 4]], dtype=torch.int32)
    return TritonAttentionMetadata(is_decoding=True, block_offsets=table, kv_seqlens=torch.tensor(LENGTHS),
                                   q_seqlens=torch.tensor([ROWS] * 3), quant_policy=0)


@pytest.mark.parametrize('causal,window', [(True, None), (False, None), (True, 4), (False, 9)])
def test_decode_rows_are_dense_attention(causal, window, monkeypatch):
    """Red when: a row of a verification sees a later one or not itself, a row of a block does not see the whole block,
    a window is one key wider or narrower than transformers', or a layer of one kind is given the rows of another."""
    from lmdeploy_focus.dflash import attention
    monkeypatch.setattr(attention.stock, 'use_fa3', False)
    step = metadata()
    cache = torch.randn(2, 8, PAGE, 2, 16, generator=torch.Generator().manual_seed(1))
    query = torch.randn(3 * ROWS, 4, 16, generator=torch.Generator().manual_seed(2))
    kinds = [(causal, window), (not causal, window)]
    for kind_causal, kind_window in kinds:
        impl = attention.build_attention(spec(causal=kind_causal, sliding_window=kind_window), None)
        result = impl.forward(query, None, None, cache[0], cache[1], step)
        assert result.shape == query.shape
        for s, length in enumerate(LENGTHS):
            keys, values = (half[step.block_offsets[s].long()].flatten(0, 1)[:length] for half in cache)
            for row in range(ROWS):
                own = length - ROWS + row + 1
                seen = slice(0 if kind_window is None else max(0, own - kind_window), own if kind_causal else length)
                at = s * ROWS + row
                expected = oracle.attention(query[at:at + 1], keys[seen], values[seen], 0.3)[0]
                torch.testing.assert_close(result[at].double(), expected, rtol=2e-5, atol=2e-5)


def test_rows_are_made_once_a_kind(monkeypatch):
    """Red when: every layer of a step makes the rows anew, or a later step is given those of an earlier one."""
    from lmdeploy_focus.dflash import attention
    monkeypatch.setattr(attention.stock, 'use_fa3', False)
    made = []
    of = DecodeRows.of
    monkeypatch.setattr(DecodeRows, 'of', lambda *args: made.append(args) or of(*args))
    layers = [attention.build_attention(spec(causal=causal), None) for causal in (True, False, True, False)]
    query, cache = torch.randn(3 * ROWS, 4, 16), torch.randn(2, 8, PAGE, 2, 16)
    for step in (metadata(), metadata()):
        for layer in layers:
            layer.forward(query, None, None, cache[0], cache[1], step)
    assert len(made) == 4


@pytest.mark.parametrize('changes', [{'logit_softcapping': 30.0}, {'alibi': True}, {'learnable_sink': True},
                                     {'head_dim': 80}])
def test_layers_that_are_refused(changes, monkeypatch):
    """Red when: a layer that our kernel would compute wrongly is built."""
    from lmdeploy_focus.dflash import attention
    monkeypatch.setattr(attention.stock, 'use_fa3', False)
    with pytest.raises(ValueError, match=f'{next(iter(changes))} of a layer is'):
        attention.build_attention(spec(**changes), None)


def test_flash_attention_3_stays_where_it_is_installed(monkeypatch):
    """Red when: it is passed over, or is given a window, which it applies to both sides of a row."""
    from lmdeploy_focus.dflash import attention
    monkeypatch.setattr(attention.stock, 'use_fa3', True)
    assert attention.build_attention(spec(), lambda given: ('stock', given)) == ('stock', spec())
    ours = attention.build_attention(spec(sliding_window=7), None)
    assert isinstance(ours, attention.DecodeRowsAttentionImpl)


def test_a_quantised_cache_is_refused():
    """Red when: scales of a quantised cache are ignored."""
    from lmdeploy_focus.dflash.attention import DecodeRowsAttentionImpl
    impl = DecodeRowsAttentionImpl(num_heads=4, head_size=16, num_kv_heads=2, sliding_window=(-1, -1))
    cache = torch.zeros(8, PAGE, 2, 16)
    with pytest.raises(ValueError, match='quantised'):
        impl.forward(torch.zeros(18, 4, 16), None, None, cache, cache, metadata(), k_scales_zeros=torch.ones(()))


def test_the_operators_of_another_engine_are_stock(monkeypatch):
    """Red when: a model that is built without DFlash gets our operator, or one with it LMDeploy's."""
    from lmdeploy.pytorch.backends.cuda import attention as cuda_attention
    from lmdeploy.pytorch.model_inputs import BuildModelContext, SpecModelBuildContext
    from lmdeploy.pytorch.models.patch import build_model_context

    from lmdeploy_focus import activate
    from lmdeploy_focus.dflash.attention import DecodeRowsAttentionImpl
    from lmdeploy_focus.dflash.targets import DFlashBuildContext
    activate()
    for context, ours in ((SpecModelBuildContext((1, 2), 3), False), (DFlashBuildContext((1, 2), 3), True)):
        with build_model_context(BuildModelContext(spec_model_ctx=context)):
            impl = cuda_attention._build_paged_attention(spec())
        assert isinstance(impl, DecodeRowsAttentionImpl) == ours


def test_write_slots():
    """Red when: a row is written to another sequence's page, or where sequences have different numbers of rows."""
    step = replace(metadata(), q_seqlens=torch.tensor([2, 0, 3]))
    pages, offsets = write_slots(step, torch.tensor([15, 16, 31, 32, 63]), PAGE)
    assert pages.tolist() == [5, 2, 3, 6, 4] and offsets.tolist() == [15, 0, 15, 0, 15]


def test_stacked_caches():
    """Red when: the stack is a copy, layers change places, or caches that are no such views are taken for them."""
    pool = torch.zeros(3, 2, 8, PAGE, 2, 16)
    layers = [pool[layer, 1] for layer in range(3)]
    whole = stacked(layers)
    whole[2, 4] = 7
    assert whole.shape == (3, 8, PAGE, 2, 16) and (pool[2, 1, 4] == 7).all() and pool.sum() == 7 * pool[0, 0, 0].numel()
    assert stacked(layers[:1]).shape == (1, 8, PAGE, 2, 16)
    for wrong in ([layers[0], layers[2], layers[1]], [layers[0], torch.zeros_like(layers[0])],
                  [layers[0], layers[1][:, :, :1]]):
        with pytest.raises(ValueError, match='is no view of the first'):
            stacked(wrong)


def test_a_graphs_outputs_have_the_features():
    """Red when: a replayed graph hands out no hidden states of the chosen layers, or those of padding."""
    from lmdeploy_focus.dflash.target_models import DFlashLlamaForCausalLM
    model = DFlashLlamaForCausalLM.__new__(DFlashLlamaForCausalLM)
    buffers = {'hidden_states': torch.rand(1, 8, 4), 'aux_hidden_states': torch.rand(1, 8, 12)}
    outputs = model.get_outputs_cudagraph(buffers, torch.zeros(1, 5, dtype=torch.long))
    assert outputs['aux_hidden_states'].equal(buffers['aux_hidden_states'][:, :5])
    del buffers['aux_hidden_states']
    assert set(model.get_outputs_cudagraph(buffers, torch.zeros(1, 5))) == {'hidden_states'}


def test_kernels_of_both_devices():
    """Red when: a kernel of DFlash has no twin, or the other way round."""
    assert vars(kernels_for('cpu')).keys() == vars(kernels_for('cuda')).keys() >= {'context_fill', 'ragged_attention'}
