"""Importance: how much more attention a masked token receives in layer 1 than in layer 0 (FOCUS, eq. 3 and 4)."""
from torch import Tensor

from ..kernels import reference
from .prefix import Queries


def delta(first: Queries, second: Queries, candidates: Tensor) -> Tensor:
    """[S, L] float32, importance in layer 1 minus importance in layer 0 of each masked token; 0 beyond the last."""
    later = reference.importance(second.query, second.key, candidates, second.scale)
    return later - reference.importance(first.query, first.key, candidates, first.scale)
