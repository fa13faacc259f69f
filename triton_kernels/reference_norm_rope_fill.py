"""Twin of `norm_rope_fill`."""
import torch
from torch import Tensor

from .reference_kv_fill import kv_fill

__all__ = ['norm_rope_fill']


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: float32 throughout, rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * wide).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by halves of the first values of each head: both products and their sum are rounded to the dtype of `x`."""
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    turned, rest = x.split([cos.size(-1), x.size(-1) - cos.size(-1)], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


def norm_rope_fill(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor,
                   value_cache: Tensor, pages: Tensor, offsets: Tensor, eps: float,
                   return_key: bool = False) -> tuple[Tensor, Tensor | None]:
    """RMSNorm and RoPE of the queries and keys of a packed projection; its keys and values go to the paged cache.

    Intermediate results are rounded to the dtype of `qkv` where stock LMDeploy rounds them: after the norm, whose
    weight is applied in float32, after each product with cos or sin, and after their sum. The heads are [H queries |
    Hkv keys | Hkv values]; the first rotary_dim values of a head are rotated by halves, the rest is only normed.

    Args:
        qkv: [N, (H + 2 * Hkv) * D].
        query_weight, key_weight: [D], of the norms over a head.
        cos, sin: [N, rotary_dim], tables of each row, both halves written out; rotary_dim even and at most D.
        key_cache, value_cache: [B, G, Hkv, D], written in place.
        pages: [N] integer, page of each row; -1 for a row that is not cached: its query and key are computed.
        offsets: [N] integer, slot within the page. No two rows share a slot.
        eps: of the norms.
        return_key: return the keys too.

    Returns:
        The queries, [N, H, D], and the keys, [N, Hkv, D], or None; in the dtype of `qkv`.
    """
    kv_heads, size = key_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, size))
    query, key, value = heads.split([heads.size(1) - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    query = rotate(norm(query, query_weight, eps), cos, sin)
    key = rotate(norm(key, key_weight, eps), cos, sin)
    kv_fill(key, value, key_cache, value_cache, pages, offsets)
    return query, key if return_key else None
