"""Suffix: layer 1's attention and the layers after it, on the kept rows."""
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.layout import Rows
from .decoder import Model
from .view import FocusView

Work = Any  # of the kernel `attention_work`


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


def work(model: Model, rows: Rows | None, query: Tensor) -> Work:
    """How the attention of the queries [N, H, D] of these rows is divided; the same in every layer."""
    assert rows is not None
    count, heads, _ = query.shape
    return model.kernels.attention_work(rows.start, heads // model.caches[0][0].size(2), count, query.dtype)


def attend(model: Model, index: int, query: Tensor, view: FocusView, rows: Rows | None, division: Work) -> Tensor:
    """Attention of rows over their visible keys, [N, H, D]."""
    assert rows is not None
    return model.kernels.ragged_attention(query, *model.caches[index], view.page_table, rows.start,
                                          rows.visible[:query.size(0)], division, view.max_kv,
                                          model.decoder.layers[index].scale, splits=view.splits)


def run(model: Model, view: FocusView, kept: Kept) -> Tensor:
    """Layer 1 from attention on, the layers after it and the final norm: [N, E]."""
    assert view.plan is not None
    query, residual, rotary, count = kept.query, kept.residual, (kept.cos, kept.sin), kept.query.size(0)
    pages, offsets = view.plan.pages[:count], view.plan.offsets[:count]
    division, layers = work(model, view.plan, query), model.decoder.layers
    attended = attend(model, 1, query, view, view.plan, division)
    hidden, residual = layers[1].finish(attended, residual[None])
    for index in range(2, len(layers)):
        query, _, residual = layers[index].queries(hidden, residual, rotary, model.caches[index], pages, offsets,
                                                   model.kernels, False)
        attended = attend(model, index, query, view, view.plan, division)
        hidden, residual = layers[index].finish(attended, residual)
    return model.decoder.norm(hidden, residual)[0]
