"""Counters of block-diffusion decoding, kept on the host beside the scheduler, for any focus setting alike."""
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from lmdeploy.messages import ScheduleMetrics
from lmdeploy.pytorch.messages import MessageStatus

from .stages.view import MASKED, UNMASKED

COUNTERS = {
    'steps': 'Denoising steps of a sequence',
    'decoded_tokens': 'Tokens decoded by those steps, with those after a stop',
    'prefix_rows': 'Rows that entered decode steps and commits (layers 0 and 1)',
    'suffix_rows': 'Rows left after eviction (the later layers)',
    'evicting_steps': 'Steps of a sequence that lost rows',
    'blocks': 'Blocks decoded',
}

_counters: WeakKeyDictionary[Any, Counter] = WeakKeyDictionary()


@dataclass
class FocusScheduleMetrics(ScheduleMetrics):
    """LMDeploy's schedule metrics with our counters."""
    counters: dict[str, int] = field(default_factory=dict)


def observe(scheduler: Any, outputs: Any, running: list[Any], decoding: bool) -> None:
    """Count one decode step, before the host's sequences learn of it.

    Args:
        scheduler: whose step it is.
        outputs: LMDeploy's batched outputs on the host.
        running: the step's sequences; those that ended in the meantime are not counted.
        decoding: False for prefill, which is not counted.
    """
    extra = outputs.extra_outputs
    if not decoding or outputs.next_token_ids is None or getattr(extra, 'dllm_mask', None) is None:
        return
    after = np.asarray(extra.dllm_mask).reshape(len(running), -1)
    length = after.shape[1]
    # stock has no such fields: each of its steps runs whole blocks
    prefix, suffix, evicting = (getattr(extra, name, None) for name in ('prefix_rows', 'suffix_rows', 'evicting'))
    total = _counters.setdefault(scheduler, Counter())
    for row, sequence in enumerate(running):
        if sequence.status != MessageStatus.RUNNING:
            continue
        masked = int((sequence.dllm_mask == MASKED).sum())
        total['steps'] += masked > 0
        total['decoded_tokens'] += masked - int((after[row] == MASKED).sum())
        total['prefix_rows'] += length if prefix is None else int(prefix[row])
        total['suffix_rows'] += length if suffix is None else int(suffix[row])
        total['evicting_steps'] += 0 if evicting is None else int(evicting[row])
        total['blocks'] += masked > 0 and bool((after[row] == UNMASKED).all())


def snapshot(scheduler: Any) -> dict[str, int]:
    """The counters of a scheduler so far, by the names of COUNTERS."""
    counters = _counters.get(scheduler, Counter())
    return {name: int(counters[name]) for name in COUNTERS}


def with_counters(metrics: ScheduleMetrics, scheduler: Any) -> FocusScheduleMetrics:
    """`metrics` with the counters of `scheduler`."""
    values = {f.name: getattr(metrics, f.name) for f in fields(ScheduleMetrics)}
    return FocusScheduleMetrics(**values, counters=snapshot(scheduler))


def run_stats(pipe: Any) -> dict[str, int]:
    """The counters of a pipeline since it was built; see COUNTERS.

    Args:
        pipe: what `lmdeploy.pipeline` returned for a `FocusEngineConfig`.

    Raises:
        ValueError: the pipeline's engine has no such counters.
    """
    metrics = pipe._run(coro=pipe.async_engine.get_schedule_metrics()).result()
    if not isinstance(metrics, FocusScheduleMetrics):
        raise ValueError(f'run_stats needs a pipeline built with backend_config=FocusEngineConfig(...), not one on '
                         f'{type(pipe.async_engine.engine).__name__}')
    return metrics.counters
