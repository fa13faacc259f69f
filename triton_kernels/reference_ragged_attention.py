"""Twin of `ragged_attention`; also what a CPU runs."""
import torch
import torch.nn.functional as F
from torch import Tensor

from .reference_attention_work import AttentionWork

__all__ = ['ragged_attention']

# Keys are gathered for some sequences at a time, up to so many values: what stays in a processor's cache, on the heap
# of its allocator, is several times faster than a gather for all of them.
_PIECE_VALUES = 2**21


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, limit: Tensor, max_kv: int,
            scale: float, first: Tensor | None) -> Tensor:
    """[S, M, H, D], padded to the rows of the longest sequence; `limit` [S, M] are visible keys, 0 where no row is, of
    which the first ones, as many as `first` [S, M] says, are hidden."""
    page_size, kv_heads = key_cache.shape[1:3]
    keys_seen = limit.amax(1)
    width = min(max_kv, int(keys_seen.max()))
    if not width:
        return torch.zeros_like(query)
    columns = torch.arange(-(-width // page_size), device=query.device)
    pages = page_table[:, :len(columns)].long().masked_fill(columns * page_size >= keys_seen[:, None], 0)
    # whole pages, by index_select: several times faster on a CPU than indexing
    keys, values = (cache.index_select(0, pages.flatten()).view(len(pages), -1, *cache.shape[2:])[:, :width].float()
                    for cache in (key_cache, value_cache))
    token = torch.arange(width, device=query.device)
    # hidden slots may hold anything, and a weight of zero does not undo a NaN
    shortest = min(width, int(keys_seen.min()))
    hidden = (token[shortest:] >= keys_seen[:, None])[:, :, None, None]
    for tensor in (keys, values):
        tensor[:, shortest:].masked_fill_(hidden, 0)
    # the query heads of a group share one key head: fold them into the query axis instead of repeating the keys
    group = query.size(2) // kv_heads
    folded = query.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3).float()
    own = token < limit[:, :, None]
    if first is not None:
        own &= token >= first[:, :, None]
    mask = own.repeat_interleave(group, 1)[:, None]
    out = F.scaled_dot_product_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask,
                                         scale=scale)
    out = out.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out.masked_fill(~own.any(2)[:, :, None, None], 0).to(query.dtype)


def ragged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, start: Tensor,
                     visible: Tensor, work: AttentionWork | None, max_kv: int, scale: float, splits: int | None = None,
                     programs: int | None = None, hidden: Tensor | None = None) -> Tensor:
    """Attention of a ragged batch over the paged cache: a row sees the first keys of its sequence, as many as it says,
    less those that its window hides.

    Args:
        query: [N, H, D], the rows of a sequence are contiguous; rows from start[S] on belong to no sequence.
        key_cache, value_cache: [B, G, Hkv, D].
        page_table: [S, P] integer, page of each G tokens of a sequence; unused columns may hold anything.
        start: [S + 1] integer, first row of each sequence; a sequence may have none.
        visible: [N] integer, number of keys that a row sees; one that sees none gets 0.
        max_kv: bound of `visible`.
        scale: factor of the scores.
        work, splits, programs: of the kernel alone: how it divides the work. Nothing here depends on them.
        hidden: [N] integer, how many of the first keys a row does not see; None hides none.

    Returns:
        [N, H, D] in the dtype of the query, 0 for rows of no sequence; accumulated in float32.
    """
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    rows = start[1:] - start[:-1]
    # a piece is padded to its longest sequence: one with many rows shares it with others of many rows
    order = rows.argsort()[int((rows == 0).sum()):]
    if not len(order):
        return out
    widest = max(1, min(max_kv, int(visible[:int(start[-1])].max())))
    for own in order.split(max(1, _PIECE_VALUES // (widest * key_cache[0, 0].numel()))):
        slot = torch.arange(int(rows[own].max()), device=query.device)
        real = slot < rows[own][:, None]
        row = (start[own][:, None] + slot).masked_fill(~real, 0)
        limit = visible[row].masked_fill(~real, 0)
        first = None if hidden is None else hidden[row]
        attended = _attend(query[row], key_cache, value_cache, page_table[own], limit, max_kv, scale, first)
        out[row[real]] = attended[real]
    return out
