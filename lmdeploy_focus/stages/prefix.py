"""Prefix: layer 0 in full, layer 1 up to its queries and keys, on all rows of the step (FOCUS, section 3.2)."""
from . import layer
from .decoder import Model, Rotary
from .layer import Queries
from .view import FocusView

__all__ = ['Queries', 'run']


def run(model: Model, view: FocusView, rows: int, keys: bool) -> tuple[Queries, Queries, Rotary]:
    """Queries of layers 0 and 1 on T rows, with keys where they are ranked, and the rotary tables of the rows.

    The KV of all rows is written, evicted or not: layers 0 and 1 never miss a key.
    """
    entered = view.entered
    assert entered is not None
    hidden, rotary = layer.embed(model, entered, rows)
    first = layer.queries(model, 0, hidden, None, rotary, entered, keys)
    hidden, residual = layer.finish(model, 0, first, view, entered, layer.work(model, entered, first.query))
    return first, layer.queries(model, 1, hidden, residual, rotary, entered, keys), rotary
