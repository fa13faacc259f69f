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


def rows_of(view: FocusView, rows: int, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """The sampled rows of some sequences, without asking the device how many they are.

    Args:
        rows: R, sampled rows at most.
        sequences: [C] int64.

    Returns:
        Indices [U] among the R, those of the sequences first, U at most C L; and which of them are [U] bool.
    """
    plan = view.plan
    assert plan is not None
    real = torch.arange(rows, device=sequences.device) < plan.sampled_start[-1]
    theirs = torch.isin(plan.sampled_sequence[:rows], sequences) & real
    at = theirs.logical_not().long().argsort(stable=True)[:sequences.numel() * view.length]
    return at, theirs[at]


def logits(model: Model, view: FocusView, hidden: Tensor, rows: Tensor | slice) -> Tensor:
    """Logits [U, V] of the sampled rows `rows`, of hidden states [N, E]."""
    assert view.plan is not None
    return model.head(hidden[view.plan.sampled[rows]])


def sample(model: Model, view: FocusView, hidden: Tensor, rows: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Tokens and confidences [R] of the sampled rows."""
    assert view.plan is not None
    tokens, scores = [], []
    for start in range(0, max(rows, 1), _CHUNK):
        end = min(start + _CHUNK, rows)
        real = (view.plan.sampled_start[-1:] - start).clamp(0, end - start)
        drawn = sampler(logits(model, view, hidden, slice(start, end)), real, view.plan.sampled_sequence[start:end],
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
