"""A profile of a few steady steps: how busy the device is, and which kernels take its time."""
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# steps between the start of steady state and that of the profile: blocks that began together are apart by then
SETTLE_STEPS = 40


class Profile:
    """Starts some steps after `begin`, lasts `steps` decode steps, then calls `done`."""

    def __init__(self, counted: Any, steps: int, device: str):
        self.counted, self.steps, self.device = counted, steps, device
        # of a GPU the kernels alone: records of the host's calls would slow the host down
        self.profiler = profile(activities=[ProfilerActivity.CUDA if device == 'cuda' else ProfilerActivity.CPU])
        self.done: Callable[[], None] = lambda: None
        self.seconds = 0.0

    def begin(self) -> None:
        """Steady state begins."""
        self.start, self.counted.on_step = self.counted.forwards + SETTLE_STEPS, self._step

    def _step(self) -> None:
        reached = self.counted.forwards - self.start
        if reached == 0 and not self.seconds:
            self.profiler.start()
            self.seconds = time.perf_counter()
        elif reached >= self.steps:
            self.counted.on_step = None
            if self.device == 'cuda':
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds
            self.profiler.stop()
            self.done()

    def write(self, path: Path) -> None:
        """JSON: seconds, steps, share of the time in which a kernel ran, and the kernels by time."""
        kind = DeviceType.CUDA if self.device == 'cuda' else DeviceType.CPU
        totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        spans = []
        for event in self.profiler.events():
            # annotations span whole stages of a step
            if event.device_type != kind or event.is_user_annotation:
                continue
            took = event.self_cpu_time_total if self.device == 'cpu' else event.time_range.elapsed_us()
            totals[event.name][0] += 1
            totals[event.name][1] += took
            spans.append((event.time_range.start, event.time_range.end))
        kernels = [{'name': name, 'calls_per_step': round(calls / self.steps, 2),
                    'us_per_step': round(micros / self.steps, 2)} for name, (calls, micros) in totals.items()]
        kernels.sort(key=lambda kernel: -kernel['us_per_step'])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({
            'steps': self.steps, 'ms_per_step': round(1e3 * self.seconds / self.steps, 3),
            'busy': round(covered(spans) / 1e6 / self.seconds, 4) if self.device == 'cuda' else None,
            'kernels': kernels}, indent=1))


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float('-inf')
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
