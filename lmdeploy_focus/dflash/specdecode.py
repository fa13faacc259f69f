"""The engine's speculative config, from target, drafter and engine options."""
import os
from dataclasses import dataclass
from typing import Any

from lmdeploy.pytorch.config import CacheConfig, DistConfig, ModelConfig, SpecDecodeConfig
from lmdeploy.utils import get_logger, get_model

from .admission import admit_dflash
from .checkpoint import tensor_shapes
from .config import DFLASH_ON, DFlashConfig

logger = get_logger('lmdeploy')

# The drafter's cache has the target's pages: block tables are shared.
_SHARED_CACHE_FIELDS = ('max_batches', 'block_size', 'kernel_block_size', 'num_cpu_blocks', 'num_gpu_blocks',
                        'cache_max_entry_count', 'max_prefill_token_num', 'cudagraph_capture_batch_sizes',
                        'device_type', 'quant_policy', 'migration_backend')


@dataclass
class DFlashSpecDecodeConfig(SpecDecodeConfig):
    """LMDeploy's config of speculative decoding, of an engine with `DFlashConfig`; travels to every worker."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        from .. import activation
        activation.activate()


def build(target_model: str, dflash: DFlashConfig, engine_config: Any, cache_config: CacheConfig,
          dist_config: DistConfig, trust_remote_code: bool = False) -> DFlashSpecDecodeConfig:
    """Check target and drafter and build the config of both's engine.

    Raises:
        ValueError: see `admit_dflash`; or the drafter's weights cannot safely be cast to the target's dtype.
    """
    folder = dflash.model
    if not os.path.exists(folder):
        folder = get_model(folder, engine_config.download_dir)
    dflash = DFlashConfig(folder, dflash.num_speculative_tokens)
    drafter = admit_dflash(target_model, engine_config, dflash)
    common = {'trust_remote_code': trust_remote_code, 'dist_config': dist_config, 'spec_method': dflash.method,
              'block_size': cache_config.block_size, 'device_type': cache_config.device_type}
    target = ModelConfig.from_pretrained(target_model, dtype=engine_config.dtype, is_draft_model=False,
                                         num_spec_tokens=dflash.num_speculative_tokens,
                                         model_format=engine_config.model_format,
                                         hf_overrides=engine_config.hf_overrides, **common)
    dtype = str(target.dtype).removeprefix('torch.')
    check_cast(drafter.name, drafter.dtype, dtype)
    model_config = ModelConfig.from_pretrained(folder, dtype=dtype, is_draft_model=True, **common)
    chosen = drafter.layers_of(target.hf_config.num_hidden_layers)
    drafter.normalise(model_config.hf_config, tensor_shapes(drafter, target.hidden_size, len(chosen)))
    return DFlashSpecDecodeConfig(model=folder,
                                  method=dflash.method,
                                  cache_config=CacheConfig(**{name: getattr(cache_config, name)
                                                              for name in _SHARED_CACHE_FIELDS}),
                                  num_speculative_tokens=dflash.num_speculative_tokens,
                                  model_config=model_config,
                                  dist_config=dist_config,
                                  target_layer_ids=chosen,
                                  mask_token_id=drafter.mask_token_id)


def check_cast(name: str, of_drafter: str | None, of_target: str) -> None:
    """Say that the drafter's weights are cast to the target's dtype, or refuse it.

    Raises:
        ValueError: the drafter is bfloat16 and the target float16: a bfloat16 network overflows there.
    """
    if of_drafter in (None, of_target):
        return
    if (of_drafter, of_target) == ('bfloat16', 'float16'):
        raise ValueError(f'dtype of {name} is bfloat16 and the target runs in float16, where it would overflow; '
                         f'--dtype (dtype) must be bfloat16 with {DFLASH_ON}')
    logger.warning(f'The drafter {name} is {of_drafter}; its weights are cast to the {of_target} of the target.')
