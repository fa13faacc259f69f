"""What a CPU engine refuses, before a model is loaded, and LMDeploy's environment check without an accelerator."""
from typing import Any

from lmdeploy.messages import PytorchEngineConfig, QuantPolicy
from lmdeploy.pytorch.check_env.deeplink import DeeplinkChecker
from lmdeploy.pytorch.check_env.torch import TorchChecker
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine.engine_checker import EngineChecker

DTYPES = ('auto', 'bfloat16', 'float16', 'float32')


def check_config(config: PytorchEngineConfig) -> None:
    """Refuse options that a CPU engine does not have.

    Raises:
        ValueError: Names the option, its value and what is possible.
    """
    # option, is it possible, what is possible
    rules: tuple[tuple[str, bool, str], ...] = (
        ('dtype', config.dtype in DTYPES, f'must be one of {", ".join(DTYPES)}'),
        ('tp', config.tp == 1, 'must be 1'),
        ('dp', config.dp == 1, 'must be 1'),
        ('ep', config.ep == 1, 'must be 1'),
        ('quant_policy', config.quant_policy == QuantPolicy.NONE, 'must be 0, an unquantised KV cache'),
        ('distributed_executor_backend', config.distributed_executor_backend in (None, 'uni'), "must be 'uni'"),
        ('mp_engine_backend', config.mp_engine_backend == 'mp', "must be 'mp'"),
        ('enable_microbatch', not config.enable_microbatch, 'must be off'),
        ('enable_eplb', not config.enable_eplb, 'must be off'),
        ('empty_init', not config.empty_init, 'must be off'),
        ('adapters', not config.adapters, 'must be none'),
        ('model_format', config.model_format is None, 'must be none'),
        ('role', config.role == EngineRole.Hybrid, 'must be Hybrid'),
        ('kv_transfer_config', config.kv_transfer_config is None, 'must be none'),
    )
    for option, possible, bound in rules:
        if not possible:
            raise ValueError(f"{option} {bound} with device_type='cpu', but got {getattr(config, option)!r}")


class CpuEngineChecker(EngineChecker):
    """LMDeploy's check of torch, transformers, the model and the options; it asks for no accelerator.

    Raises:
        ValueError: An option is refused, see `check_config`. This needs no environment check to be enabled.
    """

    _required_checker: list[Any]

    def __init__(self, model_path: str, engine_config: PytorchEngineConfig, **kwargs: Any) -> None:
        check_config(engine_config)
        super().__init__(model_path=model_path, engine_config=engine_config, **kwargs)
        self._required_checker = [c for c in self._required_checker if not isinstance(c, DeeplinkChecker)]
        for checker in self._required_checker:
            for torch_checker in (checker, *checker._required_checker):
                if isinstance(torch_checker, TorchChecker):
                    torch_checker.device = 'cpu'
