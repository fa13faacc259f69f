"""FocusEngineConfig: bounds, defaults, and how it gets about."""
import copy
import dataclasses
import math
import multiprocessing
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.messages import PytorchEngineConfig
from lmdeploy.pytorch.disagg.config import EngineRole

from lmdeploy_focus.config import OPTION, OPTIONS, FocusDLLMConfig, FocusEngineConfig, FocusParams, check_values

STOCK = {field.name: field.default for field in dataclasses.fields(FocusEngineConfig)}


def test_defaults():
    """Red when a default departs from the options table."""
    assert FocusEngineConfig().focus_params() == FocusParams(
        policy='auto', alpha=1.5, selection='top', keep=None, cache='delayed-neighbour', kv_visible='progress',
        commit='uncached', deterministic=False)
    assert FocusEngineConfig(focus=False).focus_params() is None


@pytest.mark.parametrize('options, threshold', [({}, 0.8), ({'focus': False}, 0.85),
                                                ({'dllm_confidence_threshold': 1}, 1.0),
                                                ({'focus': False, 'dllm_confidence_threshold': 0.3}, 0.3)])
def test_threshold(options, threshold):
    """Red when 0.8 is LMDeploy's default too, or when a given threshold is overwritten."""
    assert FocusEngineConfig(**options).dllm_confidence_threshold == threshold
    assert PytorchEngineConfig().dllm_confidence_threshold == 0.85


GOOD = {
    'focus': [True, False],
    'focus_policy': ['auto', 'always', 'never'],
    'focus_alpha': [1, 1.0, 1.5, 1e300],
    'dllm_confidence_threshold': [5e-324, 0.5, 1, None],
    'dllm_unmasking_strategy': ['low_confidence_dynamic', 'low_confidence_static', 'sequential'],
    'dllm_denoising_steps': [1, 32, None],
    'dllm_block_length': [4, 8, 16, 32, 64, None],
    'focus_selection': ['top', 'random', 'bottom'],
    'focus_keep': [1, 64, 10**30, None],
    'focus_cache': ['delayed-neighbour', 'delayed', 'off'],
    'focus_kv_visible': ['progress', 'reference'],
    'focus_commit': ['uncached', 'full'],
    'focus_deterministic': [False, True],
    'device_type': ['cuda', 'cpu'],
}
BAD = {
    'focus': [None, 1, 'yes'],
    'focus_policy': ['', 'Auto', None, 1],
    'focus_alpha': [0.999, 0, -1, 10**400, math.nan, math.inf, -math.inf, None, '1.5', True, [1.5]],
    'dllm_confidence_threshold': [0, -0.0, 1.0000001, math.nan, math.inf, '0.8', True],
    'dllm_unmasking_strategy': ['dynamic', None, ''],
    'dllm_denoising_steps': [0, -1, 1.5, '4'],
    'dllm_block_length': [0, 2, 5, 12, 63, 65, 128, '32', 31.9],
    'focus_selection': ['best', None],
    'focus_keep': [0, -1, 1.5, math.nan, '4', True],
    'focus_cache': ['on', None, 'fast-dllm-v2'],
    'focus_kv_visible': ['all', None],
    'focus_commit': ['none', None],
    'focus_deterministic': ['no', 0, None],
    'device_type': ['tpu', 'CPU', None, ''],
}


def test_the_tables_name_every_option():
    """Red when an option is added without bounds to test."""
    assert set(GOOD) == set(BAD) == set(OPTION)


@pytest.mark.parametrize('field, value', [(field, value) for field, values in GOOD.items() for value in values])
def test_values_inside_the_bounds(field, value):
    """Red when a bound is too narrow, or when an option changes the value it is given."""
    config = FocusEngineConfig(**{field: value})
    if value is not None or field != 'dllm_confidence_threshold':
        assert getattr(config, field) == value


@pytest.mark.parametrize('field, value', [(field, value) for field, values in BAD.items() for value in values])
def test_values_outside_the_bounds(field, value):
    """Red when a bound is not held, or when the message lacks flag, field, value or bound."""
    with pytest.raises(ValueError) as caught:
        FocusEngineConfig(**{field: value})
    option = OPTION[field]
    for part in (f'{option.flag} ({field}) is {value!r}', option.bound):
        assert part in str(caught.value)
    assert '\n' not in str(caught.value)


def test_a_later_cache_is_told_as_such():
    """Red when a value that is planned reads like a misspelling."""
    with pytest.raises(ValueError, match='fast-dllm-v2.*not available yet'):
        FocusEngineConfig(focus_cache='fast-dllm-v2')


@given(alpha=st.floats() | st.integers(), threshold=st.floats())
def test_number_bounds(alpha, threshold):
    """Red when a bound is open where it should be closed, or when a NaN or an infinity gets through."""
    for field, value, inside in (('focus_alpha', alpha, 1 <= alpha < math.inf),
                                 ('dllm_confidence_threshold', threshold, 0 < threshold <= 1)):
        try:
            check_values({**STOCK, field: value})
        except ValueError:
            assert not inside
        except OverflowError:
            raise AssertionError(f'{value} is not handled') from None
        else:
            assert inside


def test_huge_numbers_reach_the_engine_as_the_longest_block():
    """Red when a number that does not fit the engine's integers is handed on: 64 keeps every position just the same."""
    params = FocusEngineConfig(focus_alpha=1e300, focus_keep=10**30).focus_params()
    assert (params.alpha, params.keep) == (64.0, 64)


REFUSED_WITH_FOCUS = [
    ({'quant_policy': 8}, '--quant-policy (quant_policy) is 8'),
    ({'quant_policy': 4}, '--quant-policy (quant_policy) is 4'),
    ({'tp': 0}, '--tp (tp) is 0'),
    ({'dp': 2, 'tp': 1}, '--dp (dp) is 2'),
    ({'ep': 2}, '--ep (ep) is 2'),
    ({'enable_microbatch': True}, '--enable-microbatch'),
    ({'enable_eplb': True}, '--enable-eplb'),
    ({'enable_prefix_caching': True}, '--enable-prefix-caching'),
    ({'adapters': {'a': 'b'}}, '--adapters'),
    ({'role': EngineRole.Prefill}, "--role (role) is 'Prefill'"),
    ({'logprobs_mode': 'raw_logits'}, '--logprobs-mode'),
    ({'enable_return_routed_experts': True}, '--enable-return-routed-experts'),
    ({'device_type': 'ascend'}, "--device (device_type) is 'ascend'"),
    ({'hf_overrides': {'memory_model_path': 'm'}}, '--hf-overrides'),
    ({'dtype': 'float32'}, '--dtype (dtype) is float32'),
    ({'dllm_block_length': 32, 'block_size': 16}, '--cache-block-seq-len (block_size) is 16'),
    ({'dllm_block_length': 64, 'kernel_block_size': 32}, '--kernel-block-size (kernel_block_size) is 32'),
    ({'dllm_block_length': 32, 'block_size': 48}, '--cache-block-seq-len (block_size) is 48'),
    ({'dllm_block_length': 4, 'dllm_denoising_steps': 5}, '--dllm-denoising-steps (dllm_denoising_steps) is 5'),
    ({'dllm_block_length': 32, 'max_prefill_token_num': 100}, '--max-prefill-token-num'),
    ({'dllm_block_length': 32, 'max_prefill_token_num': 0}, '--max-prefill-token-num'),
]


@pytest.mark.parametrize('options, message', REFUSED_WITH_FOCUS)
def test_combinations_that_are_refused_with_focus(options, message):
    """Red when a combination that gives wrong answers is let through, or refused without naming the option."""
    with pytest.raises(ValueError) as caught:
        FocusEngineConfig(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize('options', [options for options, _ in REFUSED_WITH_FOCUS
                                     if not {'dtype', 'kernel_block_size'} & set(options) and options.get('tp') != 0
                                     and options.get('block_size') != 48])
def test_focus_off_refuses_nothing_of_stocks(options):
    """Red when a limit of ours is put on a stock run. (The options left out are refused by LMDeploy itself.)"""
    FocusEngineConfig(focus=False, **options)


@pytest.mark.parametrize('options', [{'tp': 2}, {'dp': 2}, {'ep': 2}, {'quant_policy': 8},
                                     {'distributed_executor_backend': 'mp'}, {'distributed_executor_backend': 'ray'}])
@pytest.mark.parametrize('focus', [True, False])
def test_combinations_that_are_refused_on_a_cpu(options, focus):
    """Red when a CPU run would start what only a GPU can do."""
    field = next(iter(options))
    with pytest.raises(ValueError, match=rf'\({field}\)'):
        FocusEngineConfig(focus=focus, device_type='cpu', **options)


@pytest.mark.parametrize('focus', [True, False])
def test_a_cpu_config(focus):
    """Red when LMDeploy's own check refuses the device or the dtype, or when the batch size is asked of torch.cuda."""
    config = FocusEngineConfig(focus=focus, device_type='cpu', dtype='float32')
    assert (config.device_type, config.dtype) == ('cpu', 'float32')
    assert config.max_batch_size > 0
    assert config.kernel_block_size == config.block_size == 64
    assert FocusEngineConfig(device_type='cpu', max_batch_size=3).max_batch_size == 3
    assert FocusEngineConfig().max_batch_size is None


def test_stocks_own_checks_still_run():
    """Red when our __post_init__ replaces LMDeploy's instead of adding to it."""
    assert FocusEngineConfig(quant_policy=0).quant_policy.name == 'NONE'
    with pytest.raises(AssertionError, match='cache_max_entry_count'):
        FocusEngineConfig(cache_max_entry_count=2)
    with pytest.raises(AssertionError):
        FocusEngineConfig(device_type='cpu', dtype='float64')


def test_from_stock():
    """Red when a field of either class is lost, or when the stock config is changed."""
    stock = PytorchEngineConfig(session_len=77, block_size=128, hf_overrides={'a': 1})
    before = copy.deepcopy(stock)
    ours = FocusEngineConfig.from_stock(stock, focus_alpha=3, dllm_confidence_threshold=0.7)
    assert stock == before
    expected = {**vars(stock), 'focus_alpha': 3.0, 'dllm_confidence_threshold': 0.7}
    assert {name: getattr(ours, name) for name in expected} == expected
    assert ours.focus
    assert FocusEngineConfig.from_stock(ours, focus_keep=2).focus_alpha == 3.0


def test_from_stock_with_focus_off_accepts_what_stock_accepts():
    """Red when a stock command that works starts to fail because the package is installed."""
    stock = PytorchEngineConfig(dllm_block_length=2, dllm_confidence_threshold=7.0, quant_policy=8, tp=2)
    ours = FocusEngineConfig.from_stock(stock, focus=False)
    assert {name: getattr(ours, name) for name in vars(stock)} == vars(stock)
    assert dataclasses.asdict(ours)['focus'] is False
    assert ours == copy.deepcopy(ours)


def test_dataclass_tools():
    """Red when LMDeploy's uses of asdict, replace and class-level defaults would miss our fields."""
    config = FocusEngineConfig(focus_keep=5)
    assert dataclasses.asdict(config)['focus_keep'] == 5
    changed = dataclasses.replace(config, focus_alpha=2)
    assert (changed.focus_keep, changed.focus_alpha) == (5, 2.0)
    with pytest.raises(ValueError, match='focus_alpha'):
        dataclasses.replace(config, focus_alpha=0)
    for option in OPTIONS:
        assert hasattr(FocusEngineConfig, option.field)  # `chat` sets only fields that the class has


def test_later_changes_are_checked_again():
    """Red when a field that was set after construction escapes the bounds."""
    config = FocusEngineConfig()
    config.focus_alpha = math.nan
    with pytest.raises(ValueError, match='focus_alpha'):
        config.validate()


def test_copies_keep_the_class():
    """Red when LMDeploy's deep copy of its engine config loses our fields."""
    config = FocusEngineConfig(focus_alpha=2.25)
    for copied in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert type(copied) is FocusEngineConfig
        assert copied == config


def test_a_spawned_process_is_activated():
    """Red when the config no longer brings the extension into a process that LMDeploy spawns, or brings too much; or
    when the import of our modules, rather than a config object, patches anything."""
    config = FocusEngineConfig()
    carriers = [(_Imported('lmdeploy_focus.config'), set()), (FocusEngineConfig(focus=False), set()),
                (config, {'engine'}),
                (FocusDLLMConfig(focus=config.focus_params()), {'engine'}),
                (FocusEngineConfig(device_type='cpu', focus=False), {'engine', 'cpu'})]
    look = ('({row.group for row in patches.REGISTER if patches.applied(row)}, '
            '{row.group for row in patches.REGISTER if not patches.applied(row)}, '
            'builders._sub_classes[0].__module__, patches.undo(patches.REGISTER))')
    builders = ['lmdeploy.pytorch.configurations.', *['lmdeploy_focus.models.configs'] * 4]
    names = {'patches': _Imported('lmdeploy_focus.patches'),
             'builders': _Imported('lmdeploy.pytorch.configurations', 'AutoModelConfigBuilder')}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:
        for (carrier, groups), builder in zip(carriers, builders, strict=True):
            on, off, first, _ = pool.submit(eval, look, {'carrier': carrier, **names}).result()
            assert (on, off) == (groups, {'cli', 'boundary', 'engine', 'cpu'} - groups)
            assert first.startswith(builder)


class _Imported:
    """A module or a name in it, which a spawned process imports for itself."""

    def __init__(self, *path):
        self._path = path

    def __reduce__(self):
        return (pkgutil.resolve_name, (':'.join(self._path), ))
