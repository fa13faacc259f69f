"""Unmasking: head and sampling on the masked kept rows, and what follows from it for the block."""
from collections.abc import Callable

import torch
from torch import Tensor

from . import replay
from .decoder import Model
from .step_options import StepOptions
from .view import FocusView

# Logits [R, V], how many rows are real [1], their sequences and block positions [R] -> tokens [R] int64, confidence
# [R] float32.
Sampler = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# Rows whose logits exist at a time: a vocabulary of 152k makes 0.3 GB of them in bf16.
_CHUNK = 1024


def confidence(logits: Tensor, tokens: Tensor) -> Tensor:
    """Softmax probability of the sampled tokens, [R, V] and [R] -> [R] float32, after temperature as in LMDeploy."""
    logits = logits.float()
    return (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()


def logits(model: Model, view: FocusView, hidden: Tensor, start: int, end: int) -> Tensor:
    """Logits [end - start, V] of sampled rows, of hidden states [N, E]."""
    assert view.plan is not None
    return model.head(hidden[view.plan.sampled[start:end]])


def sample(model: Model, view: FocusView, hidden: Tensor, rows: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Tokens and confidences [R] of the sampled rows."""
    assert view.plan is not None
    tokens, scores = [], []
    for start in range(0, max(rows, 1), _CHUNK):
        end = min(start + _CHUNK, rows)
        real = (view.plan.sampled_start[-1:] - start).clamp(0, end - start)
        drawn = sampler(logits(model, view, hidden, start, end), real, view.plan.sampled_sequence[start:end],
                        view.plan.sampled_position[start:end])
        tokens.append(drawn[0])
        scores.append(drawn[1])
    if len(tokens) == 1:
        return tokens[0], scores[0]
    return torch.cat(tokens), torch.cat(scores)


def settle(model: Model, view: FocusView, options: StepOptions, tokens: Tensor, scores: Tensor) -> Tensor:
    """Accept tokens (every one that is confident enough, the best one always), advance the state, find what stops.

    Returns:
        The step's report, [S, report_width(L)] int64.
    """
    assert view.entered is not None and view.plan is not None
    recorded = replay.current()
    if recorded is not None:
        tokens, scores = recorded.decisions(view.table, view.plan, tokens, scores)
    view.report = model.kernels.settle(
        view.table, view.entered, view.plan, view.pace, tokens, scores, view.stop_words, options.mask_token,
        view.length, strategy=options.strategy, tokens_per_step=options.tokens_per_step, cache=options.cache,
        full_commit=options.commit == 'full', report=view.report)
    return view.report
