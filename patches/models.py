"""Chooses the model class for each config."""
import functools
from typing import Any

from ._patch import Patch


def _build_model(original: Any) -> Any:

    @functools.wraps(original)
    def build_model_from_hf_config(model_config: Any, dtype: Any = None, device: Any = None, ctx_mgr: Any = None,
                                   build_model_ctx: Any = None) -> Any:
        from ..config import FocusDLLMConfig
        dllm_config = None if build_model_ctx is None else build_model_ctx.dllm_config
        if isinstance(dllm_config, FocusDLLMConfig) and dllm_config.focus is not None:
            from ..models.configs import focus_hf_config
            model_config = focus_hf_config(model_config)
        return original(model_config, dtype=dtype, device=device, ctx_mgr=ctx_mgr, build_model_ctx=build_model_ctx)

    return build_model_from_hf_config


ROWS = (
    Patch(
        name='model-class',
        target='lmdeploy.pytorch.models.patch:build_model_from_hf_config',
        why='LMDeploy looks a model class up by the architecture alone, so a registered class would serve stock too',
        how='with focus on, builds from a copy of the HF config that names our architecture',
        remove_when='the class lookup gets the build context',
        written_for={
            'lmdeploy.pytorch.models.patch:build_model_from_hf_config':
                'sha256:411c3780e684f185bf59da4fc20089ee299b6c1e447546fce06fbe9216050631',
            'lmdeploy.pytorch.models.patch:_get_model_class':
                'sha256:0b68832f71685cb8389846134ad21ef94b09a7f5ede651cfa8a3a348d9478bda',
            'lmdeploy.pytorch.models.patch:_get_module_map':
                'sha256:86401d92cdddcce1588f38c2bb4e30a67066944ae10eb39a05d027c9a180f619',
            'lmdeploy.pytorch.configurations.builder:AutoModelConfigBuilder':
                'sha256:febc8603b4b3f19141f1a1a5cd46fc404c2ea2d10bacbc1cd9209c001db754ea',
            'lmdeploy.pytorch.configurations.sdar:SDARModelConfigBuilder':
                'sha256:f421e9c2c5ab9a84d2b77e9dbac40a6a2341429c7464fa94f59479611cdf2119',
            'lmdeploy.pytorch.configurations.default:DefaultModelConfigBuilder':
                'sha256:477436e0bf523a7c8029f950dab32946ea1c83bd0b148465a54d367745e61c6d',
        },
        make=_build_model,
        group='engine',
    ),
)
