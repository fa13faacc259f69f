"""Carries the options of FOCUS from the engine config to the workers."""
import functools
from typing import Any

from ._patch import Patch


def _build_misc_config(original: Any) -> Any:

    @functools.wraps(original)
    def build_misc_config(engine_config: Any) -> Any:
        misc_config = original(engine_config)
        from ..config import FocusDLLMConfig, FocusEngineConfig
        if isinstance(engine_config, FocusEngineConfig) and engine_config.focus:
            misc_config.dllm_config = FocusDLLMConfig(**vars(misc_config.dllm_config),
                                                      focus=engine_config.focus_params())
        return misc_config

    return build_misc_config


ROWS = (
    Patch(
        name='misc-config',
        target='lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_misc_config',
        why='LMDeploy copies four named dllm fields of the engine config and drops every other one',
        how='with focus on, replaces the dllm config by our subclass, which holds the options as well',
        remove_when='MiscConfig.from_engine_config lets the engine config build its own dllm config',
        written_for={
            'lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_misc_config':
                'sha256:a13aa40048ac937b6e4ecff3b11230274203279ab751115ade0ac5a7746fc26d',
            'lmdeploy.pytorch.config:MiscConfig.from_engine_config':
                'sha256:c9c3d386d9d2fd44387a11785a6e6bff22de072a49b419cb7f0b83b40f94bc3f',
            'lmdeploy.pytorch.config:DLLMConfig':
                'sha256:c1a157fc50648b6866af60c47bdaeed1ba5c08ca6461cd3433064124e26553fb',
            'lmdeploy.messages:PytorchEngineConfig':
                'sha256:558b60649b26a08617d145dde55d2abd06c5c9b462343e1f1b6b0504b50f79b8',
        },
        make=_build_misc_config,
        group='engine',
    ),
)
