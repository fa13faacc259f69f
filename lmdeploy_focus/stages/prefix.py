"""Prefix: layer 0 in full, layer 1 up to its queries and keys, on all rows of the step (FOCUS, section 3.2)."""
from dataclasses import dataclass

from torch import Tensor

from .decoder import Model, Rotary
from .suffix import Work, attend
from .view import FocusView


@dataclass
class Queries:
    """A layer's queries and what the rest of the layer needs.

    Attributes:
        query: [T, H, D], key: [T, Hkv, D], both after norm and RoPE; no key where nothing is evicted.
        residual: [1, T, E].
        scale: factor of the attention scores.
    """
    query: Tensor
    key: Tensor | None
    residual: Tensor
    scale: float


def embed(model: Model, view: FocusView, rows: int) -> tuple[Tensor, Rotary]:
    """Token embeddings [1, T, E] and the rotary tables of the rows."""
    assert view.entered is not None
    hidden = model.decoder.embed(view.entered.input_ids[:rows][None])
    return hidden, model.decoder.rotary(hidden, view.entered.position_ids[:rows][None])


def queries(model: Model, index: int, hidden: Tensor, residual: Tensor | None, rotary: Rotary, view: FocusView,
            keys: bool) -> Queries:
    """A layer up to q·k; the KV of all rows is written, evicted or not: layers 0 and 1 never miss a key."""
    assert view.entered is not None
    layer, rows = model.decoder.layers[index], hidden.size(1)
    query, key, residual = layer.queries(hidden, residual, rotary, model.caches[index], view.entered.pages[:rows],
                                         view.entered.offsets[:rows], model.kernels, keys)
    return Queries(query, key, residual, layer.scale)


def finish(model: Model, index: int, layer_queries: Queries, view: FocusView, work: Work) -> tuple[Tensor, Tensor]:
    """The rest of the layer, from attention on: hidden and residual, [1, T, E] each."""
    attended = attend(model, index, layer_queries.query, view, view.entered, work)
    return model.decoder.layers[index].finish(attended, layer_queries.residual)
