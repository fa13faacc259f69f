"""What is refused for the checkpoint's sake, before a model is loaded."""
import pytest
from lmdeploy.messages import SpeculativeConfig

from lmdeploy_focus.admission import admit, resolve_block_length
from lmdeploy_focus.config import FocusEngineConfig

from ..models.checkpoints import CONFIGS


def refused(folder, _speculative=None, **options):
    with pytest.raises(ValueError) as caught:
        admit(str(folder), FocusEngineConfig(**options), speculative_config=_speculative)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_the_demo_checkpoint_is_admitted(demo):
    """Red when admission refuses what must work."""
    admit(str(demo / 'sdar'), FocusEngineConfig())
    admit(str(demo / 'sdar') + '/', FocusEngineConfig(dllm_block_length=64, device_type='cpu', dtype='float32'))


def test_an_autoregressive_model(demo):
    """Red when --focus on such a model is ignored or fails later."""
    message = refused(demo / 'ar')
    assert '--focus' in message
    assert 'Qwen3ForCausalLM' in message
    assert 'not a block-diffusion model' in message
    admit(str(demo / 'ar'), FocusEngineConfig(focus=False))
    admit(str(demo / 'ar'), FocusEngineConfig(focus=False, device_type='cpu'))


@pytest.mark.parametrize('config', CONFIGS.values(), ids=CONFIGS)
def test_mixtures_of_experts(checkpoint, config):
    """Red when one is refused, or promised row-invariant arithmetic that its experts do not have."""
    folder = checkpoint(**config)
    admit(str(folder), FocusEngineConfig())
    message = refused(folder, focus_deterministic=True)
    assert '--focus-deterministic (focus_deterministic) is True; it must be off' in message
    assert f'num_experts {config["num_experts"]}' in message
    admit(str(folder), FocusEngineConfig(focus=False, focus_deterministic=True))


def test_another_architecture_of_a_known_model_type(checkpoint):
    """Red when the model type alone decides."""
    assert 'SDARForCausalLM' in refused(checkpoint(model_type='llada2_moe'))


def test_an_architecture_named_in_the_auto_map_alone(checkpoint):
    """Red when a checkpoint without `architectures` is refused although LMDeploy finds its class."""
    folder = checkpoint(architectures='absent', auto_map={'AutoModelForCausalLM': 'modeling_sdar.SDARForCausalLM'})
    admit(str(folder), FocusEngineConfig())


@pytest.mark.parametrize('window, options', [
    ({'use_sliding_window': True, 'sliding_window': 128}, {}),
    ({'use_sliding_window': False, 'sliding_window': 128}, {'hf_overrides': {'use_sliding_window': True}}),
])
def test_sliding_window_in_use(checkpoint, window, options):
    """Red when attention would cut a block's view."""
    assert 'sliding_window' in refused(checkpoint(**window), **options)


def test_a_sliding_window_that_is_not_in_use(checkpoint):
    """Red when SDAR's default window of 4096, which is switched off, is taken for one in use."""
    admit(str(checkpoint(use_sliding_window=False, sliding_window=4096)), FocusEngineConfig())
    admit(str(checkpoint('other', use_sliding_window='absent', sliding_window=4096)), FocusEngineConfig())


def test_no_block_length(checkpoint):
    """Red when LMDeploy's default of 4 is used with focus, or the error does not say what to give."""
    folder = checkpoint(block_size='absent')
    message = refused(folder)
    assert '--dllm-block-length (dllm_block_length) is not given' in message
    assert '4, 8, 16, 32 or 64' in message
    admit(str(folder), FocusEngineConfig(dllm_block_length=16))
    admit(str(folder), FocusEngineConfig(focus=False))


@pytest.mark.parametrize('length', [0, 3, 48, 128, '32'])
def test_a_block_length_of_the_checkpoint_that_cannot_run(checkpoint, length):
    """Red when only the option's own value is held to the bounds."""
    message = refused(checkpoint(block_size=length))
    assert f'--dllm-block-length (dllm_block_length), by the checkpoint, is {length!r}' in message


def test_the_kv_page_against_the_checkpoints_block_length(checkpoint):
    """Red when a block of the checkpoint's own length would straddle pages."""
    message = refused(checkpoint(), block_size=16)
    assert '--cache-block-seq-len (block_size) is 16' in message
    assert '--kernel-block-size' in refused(checkpoint('other'), block_size=64, kernel_block_size=16)
    assert '--dllm-denoising-steps' in refused(checkpoint('third'), dllm_denoising_steps=33)


def test_resolved_block_length(checkpoint):
    """Red when the order option, config, name is lost."""
    folder = str(checkpoint('SDAR-b8', block_size='absent'))
    assert resolve_block_length(folder, FocusEngineConfig(dllm_block_length=64)) == 64
    assert resolve_block_length(folder, FocusEngineConfig()) == 8
    overridden = FocusEngineConfig(hf_overrides={'block_size': 4})  # LMDeploy overrides after its builder has read it
    assert resolve_block_length(str(checkpoint('SDAR-b16')), overridden) == 32


@pytest.mark.parametrize('mask', [4096, -1])
def test_a_mask_token_outside_the_vocabulary(checkpoint, mask):
    """Red when embedding would be read out of its bounds."""
    assert 'mask_token_id of' in refused(checkpoint(mask_token_id=mask))


def test_speculative_decoding(demo):
    """Red when the two modes, which need different engines, would be mixed."""
    draft = SpeculativeConfig(method='dflash', model='draft', num_speculative_tokens=4)
    assert '--speculative-algorithm' in refused(demo / 'sdar', _speculative=draft)
    assert '--device cpu' in refused(demo / 'ar', _speculative=draft, focus=False, device_type='cpu')
    admit(str(demo / 'ar'), FocusEngineConfig(focus=False), speculative_config=draft)


def test_ranks_that_do_not_divide_the_key_heads(demo):
    """Red when a rank would hold half a key head, or a copy that is counted twice."""
    assert 'num_key_value_heads' in refused(demo / 'sdar', tp=4)
    admit(str(demo / 'sdar'), FocusEngineConfig(tp=2))


def test_a_folder_that_is_no_checkpoint(tmp_path):
    """Red when a wrong path ends in a traceback of another library."""
    assert 'config.json' in refused(tmp_path)
    (tmp_path / 'config.json').write_text('{')
    assert 'config.json' in refused(tmp_path)


def test_options_are_checked_as_they_are_now(demo):
    """Red when a field that was set after construction reaches the engine unchecked."""
    config = FocusEngineConfig()
    config.dp = 2
    with pytest.raises(ValueError, match=r'--dp \(dp\) is 2'):
        admit(str(demo / 'sdar'), config)
