"""Counters of block-diffusion and of DFlash decoding, kept on the host beside the scheduler, for any setting alike."""
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from lmdeploy.messages import ScheduleMetrics
from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraOutputs

from .dflash.acceptance import accepted_in_step
from .stages.view import MASKED, UNMASKED

COUNTERS = {
    'steps': 'Denoising steps of a sequence',
    'decoded_tokens': 'Tokens decoded by those steps, with those after a stop',
    'prefix_rows': 'Rows that entered decode steps and commits (layers 0 and 1)',
    'suffix_rows': 'Rows left after eviction (the later layers)',
    'evicting_steps': 'Steps of a sequence that lost rows',
    'dense_steps': 'Steps of a sequence in which the policy let every row stay',
    'deferred_steps': 'Steps that a sequence sat out for want of room in the batch',
    'blocks': 'Blocks decoded',
    'verify_steps': 'Verifications of a sequence by a target of DFlash',
    'drafted_tokens': 'Tokens drafted for them',
    'accepted_tokens': 'Drafted tokens that became part of an answer',
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
    if decoding and outputs.next_token_ids is not None and isinstance(extra, ARSpecExtraOutputs):
        _observe_verification(scheduler, outputs, running)
        return
    if not decoding or outputs.next_token_ids is None or getattr(extra, 'dllm_mask', None) is None:
        return
    after = np.asarray(extra.dllm_mask).reshape(len(running), -1)
    length = after.shape[1]
    # stock has no such fields: each of its steps runs whole blocks
    names = ('prefix_rows', 'suffix_rows', 'decoded', 'evicting', 'ran', 'dense')
    figures = {name: getattr(extra, name, None) for name in names}
    total = _counters.setdefault(scheduler, Counter())
    for row, sequence in enumerate(running):
        if sequence.status != MessageStatus.RUNNING:
            continue
        masked = int((sequence.dllm_mask == MASKED).sum())
        step = {name: int(value[row]) for name, value in figures.items() if value is not None} or {
            'prefix_rows': length, 'suffix_rows': length, 'decoded': masked - int((after[row] == MASKED).sum()),
            'evicting': 0, 'ran': 1, 'dense': 0}
        total['steps'] += bool(step['ran']) and masked > 0
        total['decoded_tokens'] += step['decoded']
        total['prefix_rows'] += step['prefix_rows']
        total['suffix_rows'] += step['suffix_rows']
        total['evicting_steps'] += step['evicting']
        total['dense_steps'] += step['dense']
        total['deferred_steps'] += not step['ran']
        total['blocks'] += masked > 0 and bool((after[row] == UNMASKED).all())


def _observe_verification(scheduler: Any, outputs: Any, running: list[Any]) -> None:
    """Count one step of speculative decoding."""
    total = _counters.setdefault(scheduler, Counter())
    drafted = np.asarray(outputs.next_token_ids).size // len(running) - 1
    for _, accepted in accepted_in_step(outputs, running):
        total['verify_steps'] += 1
        total['drafted_tokens'] += drafted
        total['accepted_tokens'] += accepted


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
        pipe: what `lmdeploy.pipeline` returned for a `FocusEngineConfig` or a `DFlashConfig`.

    Raises:
        ValueError: the pipeline's engine has no such counters.
    """
    metrics = pipe._run(coro=pipe.async_engine.get_schedule_metrics()).result()
    if not isinstance(metrics, FocusScheduleMetrics):
        raise ValueError('run_stats needs a pipeline built with backend_config=FocusEngineConfig(...) or '
                         'speculative_config=DFlashConfig(...), not one on '
                         f'{type(pipe.async_engine.engine).__name__}')
    return metrics.counters
