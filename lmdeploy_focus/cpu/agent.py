"""The model agent of a CPU engine, as a mixin over LMDeploy's or ours."""
import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from lmdeploy.pytorch.distributed import get_dist_manager
from lmdeploy.utils import get_logger

from .budget import available_bytes, num_kv_blocks
from .scope import cpu_scope

logger = get_logger('lmdeploy')

if TYPE_CHECKING:
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent as _Agent
else:
    _Agent = object


def own_copy(value: Any) -> Any:
    """Copy the tensors of `value`, a tensor or a dataclass of tensors, nested ones included.

    Host and device share one memory here, while the engine counts on a transfer making a copy: the host reads the
    outputs of a step while the next one already updates its state in place.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        out = copy.copy(value)
        vars(out).update({item.name: own_copy(getattr(value, item.name)) for item in fields(value)})
        return out
    return value


def to_cpu(value: Any, non_blocking: bool = False) -> Any:
    """Take one part of a step's inputs over from the host: a tensor, an object with `to_device`, or None."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        value = value.to_device('cpu', non_blocking=non_blocking)
    return own_copy(value)


class CpuAgentMixin(_Agent):
    """Runs a model agent on the CPU.

    All work of the agent is inside `cpu_scope`, and LMDeploy's process-wide device is left alone: see `scope`.

    Raises:
        ValueError: The engine was given a drafter of another kind than DFlash, which has no CPU path.
    """

    def __init__(self, *args: Any, specdecode_config: Any = None, **kwargs: Any) -> None:
        from ..dflash.specdecode import DFlashSpecDecodeConfig
        if specdecode_config is not None and not isinstance(specdecode_config, DFlashSpecDecodeConfig):
            raise ValueError("speculative_config must be none or DFlashConfig with device_type='cpu', "
                             f'but got the method {specdecode_config.method!r}')
        super().__init__(*args, specdecode_config=specdecode_config, **kwargs)
        self.device = 'cpu'

    @contextmanager
    def all_context(self) -> Iterator[None]:
        """The contexts of this agent's work."""
        with cpu_scope(), get_dist_manager().context(self.dist_ctx), torch.inference_mode():
            yield

    async def _async_loop_inputs_preprocess(self, forward_event: asyncio.Event | None = None) -> None:
        with cpu_scope():
            await super()._async_loop_inputs_preprocess(forward_event)

    def _push_output(self, output: Any) -> None:
        super()._push_output(own_copy(output))

    def get_free_mem(self) -> int:
        """Available memory in bytes."""
        return available_bytes()

    def build_cache_plans(self, cache_config: Any, spec_cache_config: Any = None) -> tuple[int, int, int]:
        """Bytes of a KV block for target, drafter and memory model; settles `num_gpu_blocks` if it is 0."""
        sizes = super().build_cache_plans(cache_config, spec_cache_config)
        if cache_config.num_gpu_blocks == 0:
            text_config = self.model_config.hf_config.get_text_config()
            cache_config.num_gpu_blocks = num_kv_blocks(block_nbytes=sum(sizes),
                                                        block_size=cache_config.block_size,
                                                        cache_max_entry_count=cache_config.cache_max_entry_count,
                                                        available=available_bytes(),
                                                        max_length=getattr(text_config, 'max_position_embeddings',
                                                                           None))
        return sizes

    def warmup(self) -> None:
        """Nothing is compiled or captured on a CPU, so there is nothing to warm up."""
        logger.debug('A CPU engine needs no warm-up.')

    async def sleep(self, level: int = 1) -> None:
        """Give back the KV cache; the weights stay at every level, as new ones cannot be sent to a CPU engine."""
        del level
        await super().sleep(level=1)

    def wakeup(self, tags: list[str] | None = None) -> None:
        """Take a new KV cache; the weights are in place."""
        tags = ['kv_cache'] if tags is None else [tag for tag in tags if tag != 'weights']
        super().wakeup(tags)


@cache
def cpu_agent_class(base: type) -> type:
    """The class `Cpu<base>`: the agent class `base` on the CPU. One class for each base."""
    return type(f'Cpu{base.__name__}', (CpuAgentMixin, base), {'__doc__': f'{base.__name__} on the CPU.'})
