"""Twin of `context_fill`; also what a CPU runs."""
from torch import Tensor

from .reference_kv_fill import kv_fill
from .reference_norm_rope_fill import norm, rotate

__all__ = ['context_fill']


def context_fill(projected: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor,
                 value_cache: Tensor, pages: Tensor, offsets: Tensor, eps: float) -> None:
    """RMSNorm and RoPE of the keys of all layers of a drafter; they and the values go to the layers' paged caches.

    Intermediate results are rounded as in `norm_rope_fill`.

    Args:
        projected: [T, L * 2 * Hkv * D]; of each layer the keys and then the values.
        key_weight: [L, D], of the norms over a key head.
        cos, sin: [T, rotary_dim], tables of each row, both halves written out; rotary_dim even and at most D.
        key_cache, value_cache: [L, B, G, Hkv, D], written in place.
        pages: [T] integer, page of each row; -1 for a row that is not cached.
        offsets: [T] integer, slot within the page. No two rows share a slot.
        eps: of the norms.
    """
    layers, _, _, kv_heads, size = key_cache.shape
    keys, values = projected.view(len(projected), layers, 2, kv_heads, size).unbind(2)
    for layer in range(layers):
        key = rotate(norm(keys[:, layer], key_weight[layer], eps), cos, sin)
        kv_fill(key, values[:, layer], key_cache[layer], value_cache[layer], pages, offsets)
