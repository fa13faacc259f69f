"""Rows that choose the strategy factory; LMDeploy picks it by model paradigm alone and offers no registry."""
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_SOURCE = {'lmdeploy.pytorch.strategies:build_strategy_factory':
           'sha256:8e1b3b1ec7f61c815904c5b8b1c9ffcc02bcec4ebac297565dc08f94604ebfd7'}


def _choose(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_strategy_factory(model_config: Any, misc_config: Any, specdecode_config: Any = None) -> Any:
        from lmdeploy_focus.config import FocusDLLMConfig
        from lmdeploy_focus.dflash.specdecode import DFlashSpecDecodeConfig
        if isinstance(specdecode_config, DFlashSpecDecodeConfig):
            from lmdeploy_focus.dflash.strategy import DFlashStrategyFactory
            return DFlashStrategyFactory(model_config=model_config, specdecode_config=specdecode_config)
        dllm_config = misc_config.dllm_config
        if isinstance(dllm_config, FocusDLLMConfig) and dllm_config.focus is not None \
                and model_config.model_paradigm == 'dllm':
            from lmdeploy_focus.engine.strategy import FocusStrategyFactory
            return FocusStrategyFactory(model_config=model_config, dllm_config=dllm_config)
        return original(model_config, misc_config, specdecode_config)

    return build_strategy_factory


def _row(module: str) -> Patch:
    return Patch(
        name=f'strategies of {module.rpartition(".")[2]}',
        target=f'{module}:build_strategy_factory',
        why='the factory is chosen by model paradigm only, and both callers have imported the function by name',
        how='FocusStrategyFactory where the block-diffusion config carries focus, DFlashStrategyFactory with DFlash',
        remove_when='LMDeploy offers a registry of strategy factories',
        written_for=_SOURCE,
        make=_choose,
        group='engine',
    )


ROWS: tuple[Patch, ...] = (_row('lmdeploy.pytorch.engine.engine'), _row('lmdeploy.pytorch.engine.model_agent.agent'))
