"""What a CPU engine takes and what it refuses."""
import dataclasses

import pytest
from lmdeploy.messages import PytorchEngineConfig, QuantPolicy
from lmdeploy.pytorch.disagg.config import EngineRole

from lmdeploy_focus.cpu.budget import num_kv_blocks
from lmdeploy_focus.cpu.checks import check_config

GIB = 1 << 30


def blocks(available, max_length=None, block_nbytes=1 << 20, entry=0.8):
    return num_kv_blocks(block_nbytes, 64, entry, available, max_length)


def test_kv_budget_is_the_least_of_three():
    """Red when one of the bounds is lost: a share of the free memory, 4 GiB, 16 sequences of the greatest length."""
    assert blocks(8 * GIB) == int(8 * GIB * 0.8 * 0.25) >> 20
    assert blocks(8 * GIB, entry=0.4) == int(8 * GIB * 0.4 * 0.25) >> 20
    assert blocks(500 * GIB) == 4096
    assert blocks(500 * GIB, max_length=4096) == 16 * 65
    assert blocks(500 * GIB, max_length=4097) == 16 * 66
    assert blocks(8 * GIB, max_length=1 << 20) == blocks(8 * GIB)


def test_too_little_memory_names_the_option():
    """Red when an engine starts that could not schedule a single request."""
    assert blocks(80 << 20) == 16
    with pytest.raises(ValueError, match='num_gpu_blocks: .* 15 blocks .* at least 16'):
        blocks(79 << 20)


def cpu_config(**changes):
    config = PytorchEngineConfig()
    config.device_type = 'cpu'
    assert set(changes) <= {field.name for field in dataclasses.fields(config)}
    vars(config).update(changes)
    return config


@pytest.mark.parametrize('changes', [
    {},
    {'dtype': 'float32'},
    {'distributed_executor_backend': 'uni', 'enable_mp_engine': True, 'enable_prefix_caching': True},
])
def test_accepted(changes):
    """Red when an option that works is refused."""
    check_config(cpu_config(**changes))


@pytest.mark.parametrize('option,value', [
    ('dtype', 'float64'),
    ('tp', 2),
    ('dp', 2),
    ('ep', 2),
    ('quant_policy', QuantPolicy.INT8),
    ('distributed_executor_backend', 'ray'),
    ('mp_engine_backend', 'ray'),
    ('enable_microbatch', True),
    ('enable_eplb', True),
    ('empty_init', True),
    ('adapters', {'a': 'b'}),
    ('model_format', 'fp8'),
    ('role', EngineRole.Prefill),
    ('kv_transfer_config', object()),
])
def test_refused_by_name(option, value):
    """Red when an option that a CPU engine has no code for passes, or the message does not name it."""
    with pytest.raises(ValueError, match=f"^{option} must be .* device_type='cpu'.* got "):
        check_config(cpu_config(**{option: value}))
