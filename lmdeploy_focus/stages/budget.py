"""Budget: alpha times the tokens that a step of this block has decoded on average (FOCUS, eq. 5)."""
from torch import Tensor

from ..kernels import reference
from .state import FocusState


def allot(masked: Tensor, state: FocusState, alpha: float, fixed: int | None) -> Tensor:
    """[S] int64, masked tokens each sequence may keep; `fixed` replaces alpha's budget (option focus_keep)."""
    if fixed is not None:
        return masked.clamp_max(fixed)
    return reference.budget(masked, state.decoded, state.steps, alpha)
