"""Selection: the budget, and which masked tokens stay in the batch (FOCUS, section 3.3, eq. 5)."""
from .decoder import Model
from .step_options import StepOptions
from .view import FocusView


def plan(model: Model, view: FocusView, options: StepOptions, evicting: bool) -> None:
    """Leave the plan of the kept rows in the view; a step that does not evict keeps every row."""
    assert view.entered is not None and view.partials is not None
    view.plan = model.kernels.plan(
        *view.partials, view.table, view.entered, view.pace, view.length,
        keep=options.keep if evicting else view.length, selection=options.selection, sequential=options.sequential,
        kv_visible=options.kv_visible, out=view.plan)
