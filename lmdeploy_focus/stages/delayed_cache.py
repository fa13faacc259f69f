"""Neighbour-aware delayed cache: which positions still enter a step (FOCUS, section 3.5).

A position freezes after the first step in which it and its right neighbour were both decoded on input; `settle` keeps
the map. The block that the last step finished enters once more with its positions that are not frozen: its commit.
"""
from .decoder import Model
from .step_options import StepOptions
from .view import FocusView


def enter(model: Model, view: FocusView, options: StepOptions) -> None:
    """Leave the rows that enter the step in the view."""
    view.entered = model.kernels.enter(view.table, view.page_table, options.page_size, view.pace, view.length,
                                       kv_visible=options.kv_visible, out=view.entered)
