"""Importance: how much attention each masked token receives from the masked ones of its block (FOCUS, eq. 3 and 4)."""
import torch
from torch import Tensor

from . import replay
from .decoder import Model
from .prefix import Queries
from .view import FocusView


def received(model: Model, queries: Queries, view: FocusView) -> Tensor:
    """By key head, [S, Hkv, L] float32, of a sequence's j-th masked token; zeros in a step that keeps everything.

    The heads of all ranks, so that every rank adds the same numbers in the same order and picks the same rows.
    """
    assert view.entered is not None
    if queries.key is None:
        return torch.zeros((view.table.size(0), 1, view.length), device=queries.query.device)
    partial = model.kernels.importance_partial(queries.query, queries.key, view.entered.candidates, queries.scale)
    return partial if model.gather is None else model.gather(partial)


def compare(view: FocusView, first: Tensor, second: Tensor) -> None:
    """Leave both layers' importance in the view; what selection ranks is the second less the first."""
    recorded = replay.current()
    if recorded is not None:
        assert view.entered is not None
        first, second = recorded.importances(view.table, view.entered, first, second)
    view.partials = first, second
