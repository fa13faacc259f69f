"""Twin of `ragged_attention` with rows that see a prefix of their own."""
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['ragged_attention']


def ragged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, q_start: Tensor,
                     kv_len: Tensor, max_q: int, max_kv: int, scale: float, causal: bool = False,
                     position_ids: Tensor | None = None, splits: int | None = None) -> Tensor:
    """Attention of a ragged batch over the paged cache: a row sees its sequence's keys [0, kv_len), or, if causal,
    [0, min(kv_len, its position + 1)).

    Args:
        query: [N, H, D], the rows of a sequence are contiguous; rows from q_start[S] on belong to no sequence.
        key_cache, value_cache: [B, G, Hkv, D].
        page_table: [S, P] page of each G tokens of a sequence; unused columns may hold anything.
        q_start: [S + 1] integer, first row of each sequence; a sequence may have none.
        kv_len: [S] integer, visible keys; a row that sees none gets 0.
        max_q, max_kv: bounds of the rows and keys of a sequence.
        scale: factor of the scores.
        causal: hide the keys right of a row's own position; verification of a draft reads them.
        position_ids: [N] integer, position of each row in its text; needed if causal.
        splits: of the kernel alone: how it cuts the keys. Nothing here depends on it.

    Returns:
        [N, H, D] in the dtype of the query, 0 for rows of no sequence; accumulated in float32.

    Raises:
        ValueError: causal without the positions.
    """
    if causal and position_ids is None:
        raise ValueError('position_ids None: causal ragged_attention takes one position for each row')
    sequences, page_size = page_table.size(0), key_cache.size(1)
    max_kv = min(max_kv, int(kv_len.max()))
    columns = min(-(-max_kv // page_size), page_table.size(1))
    token = torch.arange(min(max_kv, columns * page_size), device=query.device)
    visible = token < kv_len[:, None]
    pages = page_table[:, token // page_size].long().masked_fill(~visible, 0)
    # hidden slots may hold anything, and a weight of zero does not undo a NaN
    keys = key_cache[pages, token % page_size].float().masked_fill(~visible[:, :, None, None], 0)
    values = value_cache[pages, token % page_size].float().masked_fill(~visible[:, :, None, None], 0)
    rows = torch.arange(int(q_start[-1]), device=query.device)
    sequence = torch.searchsorted(q_start[1:].contiguous(), rows, right=True)
    slot = rows - q_start[sequence]
    padded = query.new_zeros((sequences, max_q, *query.shape[1:]), dtype=torch.float32)
    padded[sequence, slot] = query[:len(rows)].float()
    limit = kv_len[:, None].expand(-1, max_q).clone()
    if position_ids is not None and causal:
        limit[sequence, slot] = torch.minimum(limit[sequence, slot], position_ids[:len(rows)] + 1)
    # the query heads of a group share one key head: fold them into the query axis instead of repeating the keys
    groups = query.size(1) // keys.size(2)
    folded = padded.unflatten(2, (keys.size(2), groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mask = (token < limit[:, :, None]).repeat_interleave(groups, 1)[:, None]
    out = F.scaled_dot_product_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask,
                                         scale=scale)
    out = out.unflatten(2, (max_q, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out = out.masked_fill((limit <= 0)[:, :, None, None], 0)
    result = torch.zeros_like(query)
    result[:len(rows)] = out[sequence, slot].to(query.dtype)
    return result
