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
# The last kernel of each step; steps at the profile's start that are not looked at; most microseconds of a gap such as
# lies between the kernels of a CUDA graph.
MARKER, SKIPPED, SHORT_GAP = '_settle_kernel', 3, 10.0
Span = tuple[str, float, float]


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
        """JSON: steps, milliseconds of a step, and the kernels by time; of a GPU also the share of the time in which a
        kernel ran, and where the rest lies, see :func:`timeline`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._on_cpu() if self.device == 'cpu' else timeline(self._spans()), indent=1))

    def _spans(self) -> list[Span]:
        # annotations span whole stages of a step
        return [(event.name, event.time_range.start, event.time_range.end) for event in self.profiler.events()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation]

    def _on_cpu(self) -> dict[str, Any]:
        operations = [(event.name, event.self_cpu_time_total) for event in self.profiler.events()
                      if event.device_type == DeviceType.CPU and not event.is_user_annotation]
        return {'steps': self.steps, 'ms_per_step': round(1e3 * self.seconds / self.steps, 3), 'busy': None,
                'kernels': _totals(operations, self.steps)}


def timeline(spans: list[Span]) -> dict[str, Any]:
    """What a GPU did in the profile's later steps; the first ones wait for the host, which the start of the profiler
    had stopped.

    Args:
        spans: name, start and end in microseconds of every kernel and copy.

    Returns:
        `steps`; `ms_per_step`; `busy`: share of the time in which something ran; `short_gaps` and `long_gaps`:
        microseconds of a step in gaps of up to, and of more than, SHORT_GAP; `longest_gap` in microseconds; `kernels`.

    Raises:
        ValueError: there are no more steps than are left out.
    """
    ends = sorted(end for name, _, end in spans if name.startswith(MARKER))
    if len(ends) <= SKIPPED + 1:
        raise ValueError(f'a profile of {len(ends)} steps: the first {SKIPPED} and one more are not looked at')
    begin, last, steps = ends[SKIPPED], ends[-1], len(ends) - 1 - SKIPPED
    inside = [(name, max(start, begin), min(end, last)) for name, start, end in spans if start < last and end > begin]
    gaps = idle([(start, end) for _, start, end in inside], begin, last)
    short = sum(gap for gap in gaps if gap <= SHORT_GAP)
    return {'steps': steps, 'ms_per_step': round((last - begin) / steps / 1e3, 3),
            'busy': round(1 - sum(gaps) / (last - begin), 4), 'short_gaps': round(short / steps, 2),
            'long_gaps': round((sum(gaps) - short) / steps, 2), 'longest_gap': round(max(gaps, default=0.0), 2),
            'kernels': _totals([(name, end - start) for name, start, end in inside], steps)}


def _totals(operations: list[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """Calls and microseconds a step by name, the longest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, micros in operations:
        totals[name][0] += 1
        totals[name][1] += micros
    kernels = [{'name': name, 'calls_per_step': round(calls / steps, 2), 'us_per_step': round(micros / steps, 2)}
               for name, (calls, micros) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel['us_per_step'])


def idle(spans: list[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Lengths of the gaps between intervals, from `begin` to `end`."""
    gaps, reach = [], begin
    for start, stop in [*sorted(spans), (end, end)]:
        if start > reach:
            gaps.append(start - reach)
        reach = max(reach, stop)
    return gaps
