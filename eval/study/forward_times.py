"""Times of the target's forward and of drafting by themselves, each repeated on the inputs of one decode step.

A repeated forward writes the same keys and values to the same places, so the step goes on as if it had run once. On a
GPU the repeats lie between two CUDA events, after warm ones: the host is ahead of the device, whose time it is.
"""
import time
from collections.abc import Callable
from typing import Any

import torch

WARM = 3


class ForwardTimes:
    """Wraps an engine's model agent in this process; waits, with `begin`, for a decode step of the whole batch."""

    def __init__(self, engine: Any, repeats: int, device: str) -> None:
        self.agent, self.repeats, self.device = engine.executor.model_agent, repeats, device
        self.found: dict[str, float] = {}
        self.done: Callable[[], None] = lambda: None
        self.wanted: set[str] = set()
        self.batch = 0
        self._wrap_target()
        self.proposer: Any = getattr(self.agent.spec_agent, 'proposer', None)
        if self.proposer is not None:
            self._wrap_drafter()

    def begin(self, batch: int) -> None:
        """Time the next decode step of `batch` sequences."""
        self.found, self.batch = {}, batch
        self.wanted = {'forward_ms'} if self.proposer is None else {'forward_ms', 'draft_ms'}

    def _wants(self, name: str, inputs: Any) -> bool:
        whole = inputs.is_decoding and not inputs.is_dummy and inputs.seq_length.size(0) == self.batch
        return name in self.wanted and whole

    def _wrap_target(self) -> None:
        agent, forward = self.agent, self.agent._forward_impl

        def timed(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = forward(inputs, *args, **kwargs)
            if self._wants('forward_ms', inputs):
                clock = Clock(self.device)
                for repeat in range(WARM + self.repeats):
                    if repeat == WARM:
                        clock.start()
                    outputs = forward(inputs, *args, **kwargs)
                    agent.get_logits(outputs['hidden_states'])
                self._tell('forward_ms', clock)
            return outputs

        agent._forward_impl = timed

    def _wrap_drafter(self) -> None:
        propose = self.proposer.propose

        async def timed(model_inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = await propose(model_inputs, *args, **kwargs)
            if self._wants('draft_ms', model_inputs):
                clock = Clock(self.device)
                for repeat in range(WARM + self.repeats):
                    if repeat == WARM:
                        clock.start()
                    outputs = await propose(model_inputs, *args, **kwargs)
                self._tell('draft_ms', clock)
            return outputs

        self.proposer.propose = timed

    def _tell(self, name: str, clock: 'Clock') -> None:
        self.found[name] = round(clock.milliseconds() / self.repeats, 4)
        self.wanted.discard(name)
        if not self.wanted:
            self.done()


class Clock:
    """CUDA events on the current stream; on a CPU the clock of the process."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == 'cuda'
        if self.on_gpu:
            self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        """Begin."""
        if self.on_gpu:
            self.began.record()
        else:
            self.start_s = time.perf_counter()

    def milliseconds(self) -> float:
        """Since `start`; waits for the device."""
        if not self.on_gpu:
            return 1e3 * (time.perf_counter() - self.start_s)
        self.ended.record()
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended)
