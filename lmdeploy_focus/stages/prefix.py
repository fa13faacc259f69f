"""Prefix: layer 0 in full, layer 1 up to its queries and keys, on all rows of the step (FOCUS, section 3.2)."""
from dataclasses import dataclass

from torch import Tensor

from ..kernels.reference import kv_fill
from .decoder import Decoder, KVCache, Layer, Rotary
from .suffix import attend
from .view import FocusView


@dataclass
class Queries:
    """A layer's queries and what the rest of the layer needs.

    Attributes:
        query: [T, H, D], key: [T, Hkv, D], both after norm and RoPE.
        residual: [1, T, E].
        scale: factor of the attention scores.
    """
    query: Tensor
    key: Tensor
    residual: Tensor
    scale: float


def embed(decoder: Decoder, view: FocusView) -> tuple[Tensor, Rotary]:
    """Token embeddings [1, T, E] and the rotary tables of the rows."""
    hidden = decoder.embed(view.input_ids[None])
    return hidden, decoder.rotary(hidden, view.position_ids[None])


def queries(layer: Layer, cache: KVCache, hidden: Tensor, residual: Tensor | None, rotary: Rotary,
            view: FocusView) -> Queries:
    """A layer up to q·k; the KV of all rows is written, evicted or not: layers 0 and 1 never miss a key."""
    query, key, value, residual = layer.queries(hidden, residual, rotary)
    kv_fill(key, value, *cache, view.pages, view.offsets)
    return Queries(query, key, residual, layer.scale)


def finish(layer: Layer, cache: KVCache, layer_queries: Queries, view: FocusView) -> tuple[Tensor, Tensor]:
    """The rest of the layer, from attention on: hidden and residual, [1, T, E] each."""
    attended = attend(layer, layer_queries.query, cache, view)
    return layer.finish(attended, layer_queries.residual)
