"""Suffix: layer 1's attention and the layers after it, on the kept rows."""
from torch import Tensor

from ..kernels.reference import kv_fill, ragged_attention
from .decoder import Decoder, KVCache, Layer, Rotary
from .view import FocusView


def attend(layer: Layer, query: Tensor, cache: KVCache, view: FocusView) -> Tensor:
    """Attention of the rows of `view` over its visible keys, [N, H, D]."""
    return ragged_attention(query, *cache, view.page_table, view.q_start, view.kv_len, view.block_length, view.max_kv,
                            layer.scale)


def run(decoder: Decoder, caches: list[KVCache], hidden: Tensor, residual: Tensor, rotary: Rotary, view: FocusView,
        first_layer: int) -> Tensor:
    """The layers from `first_layer` on and the final norm: [1, N, E] -> [1, N, E]."""
    for layer, cache in zip(decoder.layers[first_layer:], caches[first_layer:], strict=True):
        query, key, value, residual = layer.queries(hidden, residual, rotary)
        kv_fill(key, value, *cache, view.pages, view.offsets)
        hidden, residual = layer.finish(attend(layer, query, cache, view), residual)
    return decoder.norm(hidden, residual)
