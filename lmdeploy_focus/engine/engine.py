"""The engine: checks the model and the options before anything is loaded."""
import copy
from typing import Any

from lmdeploy.pytorch.engine.engine import Engine

from ..admission import admit, resolve_block_length
from ..config import FocusEngineConfig


class FocusEngine(Engine):
    """LMDeploy's engine for a model and options that are known to be right together."""


def admitted(model_path: str, config: FocusEngineConfig, speculative_config: Any = None,
             trust_remote_code: bool = False, **kwargs: Any) -> FocusEngineConfig:
    """`config` as the engine gets it, with the block length resolved: LMDeploy bounds the batch by it only there.

    Raises:
        ValueError: something is not supported; the message names the option, its value and the bound.
    """
    admit(model_path, config, trust_remote_code=trust_remote_code, speculative_config=speculative_config)
    if not config.focus:
        return config
    config = copy.deepcopy(config)
    config.dllm_block_length = resolve_block_length(model_path, config)
    return config
