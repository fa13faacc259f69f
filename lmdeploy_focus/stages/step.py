"""One denoising step of a block, as the paper's algorithm: calls, no tensor arithmetic.

Each part takes a number of rows: on a GPU a bucket that a CUDA graph was captured for, on a CPU what there is.
"""
from torch import Tensor

from . import compact, delayed_cache, importance, prefix, select, suffix, unmask
from .decoder import Model
from .step_options import StepOptions
from .suffix import Kept
from .view import FocusView


def enter(model: Model, view: FocusView, options: StepOptions) -> None:
    """Which rows are not cached yet."""
    delayed_cache.enter(model, view, options)


def rank(model: Model, view: FocusView, options: StepOptions, evicting: bool, rows: int) -> Kept:
    """Prefix, importance, budget and selection on T rows: what layer 1 goes on with, of all of them."""
    first, second, rotary = prefix.run(model, view, rows, evicting)
    importance.compare(view, importance.received(model, first, view), importance.received(model, second, view))
    select.plan(model, view, options, evicting)
    return Kept(second.query, second.residual[0], *rotary)


def evict(model: Model, view: FocusView, entered: Kept, rows: int) -> Kept:
    """Only the N kept rows go on."""
    return compact.take(model, view, entered, rows)


def denoise(model: Model, view: FocusView, kept: Kept) -> Tensor:
    """The rest of the model on N rows: their final hidden states [N, E]."""
    return suffix.run(model, view, kept)


def decide(model: Model, view: FocusView, options: StepOptions, hidden: Tensor, rows: int,
           sampler: unmask.Sampler) -> Tensor:
    """Sample R rows, unmask, freeze what is final, stop what has ended: the step's report."""
    tokens, scores = unmask.sample(model, view, hidden, rows, sampler)
    return unmask.settle(model, view, options, tokens, scores)
