"""Compaction: evicted rows leave the batch, the only place where a step's row count changes (FOCUS, section 3.4)."""
from .decoder import Model
from .suffix import Kept
from .view import FocusView


def take(model: Model, view: FocusView, entered: Kept, rows: int) -> Kept:
    """The first `rows` kept rows of those that entered; their keys are in the cache already."""
    assert view.plan is not None
    return Kept(*model.kernels.compact(view.plan.source[:rows], None, *vars(entered).values()))
