"""One layer on the rows of a step, cut at attention: what prefix, suffix and prefill are made of."""
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.layout import Rows
from .decoder import Model, Rotary
from .view import FocusView

Work = Any  # of the kernel `attention_work`


@dataclass
class Queries:
    """A layer's queries and what the rest of the layer needs.

    Attributes:
        query: [N, H, D], key: [N, Hkv, D], both after norm and RoPE; no key where nothing is evicted.
        residual: [1, N, E].
        scale: factor of the attention scores.
    """
    query: Tensor
    key: Tensor | None
    residual: Tensor
    scale: float


def embed(model: Model, rows: Rows, count: int) -> tuple[Tensor, Rotary]:
    """Token embeddings [1, N, E] and the rotary tables of the first `count` rows."""
    hidden = model.decoder.embed(rows.input_ids[:count][None])
    return hidden, model.decoder.rotary(hidden, rows.position_ids[:count][None])


def queries(model: Model, index: int, hidden: Tensor, residual: Tensor | None, rotary: Rotary, rows: Rows,
            keys: bool) -> Queries:
    """A layer up to its queries and keys; the KV of all rows is written."""
    layer, count = model.decoder.layers[index], hidden.size(1)
    query, key, residual = layer.queries(hidden, residual, rotary, model.caches[index], rows.pages[:count],
                                         rows.offsets[:count], model.kernels, keys)
    return Queries(query, key, residual, layer.scale)


def work(model: Model, rows: Rows, query: Tensor) -> Work:
    """How the attention of the queries [N, H, D] of these rows is divided; the same in every layer."""
    count, heads, _ = query.shape
    return model.kernels.attention_work(rows.start, heads // model.caches[0][0].size(2), count, query.dtype)


def finish(model: Model, index: int, own: Queries, view: FocusView, rows: Rows,
           division: Work) -> tuple[Tensor, Tensor]:
    """The rest of the layer, from attention over the visible keys on: hidden and residual, [1, N, E] each."""
    attended = model.kernels.ragged_attention(own.query, *model.caches[index], view.page_table, rows.start,
                                              rows.visible[:own.query.size(0)], division, view.max_kv, own.scale,
                                              splits=view.splits)
    return model.decoder.layers[index].finish(attended, own.residual)
