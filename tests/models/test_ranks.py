"""What each rank of a tensor-parallel engine holds: together the ranks have the model of one, each part once.

The ranks are built one after another in this process, on the CPU, where no rank ever speaks to another one.
"""
import pytest
import torch
from lmdeploy.pytorch.config import DistConfig, DLLMConfig, ModelConfig, QuantizationConfig
from lmdeploy.pytorch.distributed import DistContext, DistGroup, get_dist_manager
from lmdeploy.pytorch.model_inputs import BuildModelContext
from lmdeploy.pytorch.models.patch import build_patched_model
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

from lmdeploy_focus import activation
from lmdeploy_focus.config import FocusDLLMConfig, FocusEngineConfig
from lmdeploy_focus.cpu.scope import cpu_scope

from . import checkpoints, fp8

CUT = ('.qkv_proj.', '.o_proj.', '.gate_up', '.down')


def build(folder, ranks, rank, focus):
    """Name -> parameter or persistent value of one rank's model, loaded."""
    activation.activate_cpu()
    params = FocusEngineConfig(device_type='cpu').focus_params() if focus else None
    dllm = FocusDLLMConfig(block_length=32, focus=params) if focus else DLLMConfig(block_length=32)
    spread, group = DistConfig(tp=ranks), DistGroup(rank=rank)
    context = DistContext(rank=rank, dist_config=spread, tp_group=group, attn_tp_group=group, mlp_tp_group=group,
                          moe_tp_group=group)
    with cpu_scope(), get_dist_manager().context(context):
        config = ModelConfig.from_pretrained(str(folder), dtype='float32', device_type='cpu', dist_config=spread)
        built = BuildModelContext(dllm_config=dllm, quant_config=QuantizationConfig.from_config(config.hf_config))
        model = build_patched_model(config, device=torch.device('cpu'), build_model_ctx=built)
        load_model_weights(model, str(folder), device=torch.device('cpu'))
    assert type(model).__name__.startswith('Focus') is focus
    return dict(model.named_parameters())


def thirds(tensor, counts):
    """Rows of queries, keys and values, which are in this relation."""
    return tensor.split([len(tensor) * count // sum(counts) for count in counts])


def joined(name, parts, counts, copies):
    """What the ranks' parts of a parameter make together.

    Args:
        counts: query, key and value heads of one rank.
        copies: ranks that have the same key heads.
    """
    if '.qkv_proj.' in name:
        queries, keys, values = zip(*(thirds(part, counts) for part in parts), strict=True)
        for heads in (keys, values):
            for first in range(0, len(parts), copies):
                assert all(torch.equal(heads[first], copy) for copy in heads[first:first + copies])
        return torch.cat([*queries, *keys[::copies], *values[::copies]])
    if '.gate_up' in name:
        rows = 1 if '.experts.' in name else 0
        gates, ups = zip(*(part.chunk(2, rows) for part in parts), strict=True)
        return torch.cat([*gates, *ups], rows)
    if '.o_proj.' in name or '.down' in name:
        return torch.cat(parts, -1)
    assert all(torch.equal(parts[0], part) for part in parts), name
    return parts[0]


def check(folder, ranks, focus, counts, copies):
    """Hold the ranks' parameters against those of one rank."""
    whole = build(folder, 1, 0, focus)
    shares = [build(folder, ranks, rank, focus) for rank in range(ranks)]
    cut = set()
    for name, expected in whole.items():
        parts = [share.pop(name).float() for share in shares]
        torch.testing.assert_close(joined(name, parts, counts, copies), expected.float(), rtol=0, atol=0, msg=name)
        if parts[0].numel() < expected.numel():
            cut.add(name)
    assert not any(shares)
    assert cut == {name for name in whole if any(part in name for part in CUT)}


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('focus', [False, True])
def test_two_ranks(name, focus, folders):
    """Red when a head, a row of an expert or of the shared one is on no rank or on two, when LLaDA2's fused QKV product
    is cut before it is taken apart, or when the router is not whole everywhere."""
    check(folders[name], 2, focus, (2, 1, 1), 1)


@pytest.mark.parametrize('name', checkpoints.MODELS)
def test_more_ranks_than_key_heads(name, folders):
    """Red when two ranks that share a key head do not hold the same one, or LLaDA2's tensors are then taken for
    misshapen; focus refuses this, block diffusion without it does not."""
    check(folders[name], 4, False, (1, 1, 1), 2)


@pytest.mark.parametrize('name', checkpoints.MODELS)
@pytest.mark.parametrize('focus', [False, True])
def test_two_ranks_of_an_fp8_checkpoint(name, focus, tmp_path, monkeypatch):
    """Red when a rank has the scales of another rank's rows."""
    fp8.install(monkeypatch)
    sizes = fp8.SIZES | {'moe_intermediate_size': 256}  # a block of scales for each rank
    given, _ = fp8.quantised(checkpoints.weights(name, **sizes))
    folder = checkpoints.write(tmp_path / 'model', name, given, **sizes, quantization_config=fp8.QUANTISATION)
    check(folder, 2, focus, (1, 1, 1), 1)
