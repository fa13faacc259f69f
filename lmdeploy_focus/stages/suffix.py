"""Suffix: layer 1's attention and the layers after it, on the kept rows."""
from dataclasses import dataclass

from torch import Tensor

from . import layer
from .decoder import Model
from .view import FocusView


@dataclass
class Kept:
    """What layer 1 goes on with: query [N, H, D], residual [N, E] and rotary tables [N, rotary size] of some rows."""
    query: Tensor
    residual: Tensor
    cos: Tensor
    sin: Tensor

    def room(self, rows: int) -> 'Kept':
        """Empty tensors like these, of so many rows."""
        return Kept(**{name: value.new_zeros((rows, *value.shape[1:])) for name, value in vars(self).items()})

    def take(self, other: 'Kept') -> None:
        """Copy the rows of `other` to the first ones of these."""
        for name, value in vars(other).items():
            getattr(self, name)[:value.size(0)] = value


def run(model: Model, view: FocusView, kept: Kept) -> Tensor:
    """Layer 1 from attention on, the layers after it and the final norm: [N, E]."""
    plan, rotary = view.plan, (kept.cos, kept.sin)
    assert plan is not None
    division = layer.work(model, plan, kept.query)
    own = layer.Queries(kept.query, None, kept.residual[None], model.decoder.layers[1].scale)
    hidden, residual = layer.finish(model, 1, own, view, plan, division)
    for index in range(2, len(model.decoder.layers)):
        own = layer.queries(model, index, hidden, residual, rotary, plan, keys=False)
        hidden, residual = layer.finish(model, index, own, view, plan, division)
    return model.decoder.norm(hidden, residual)[0]
