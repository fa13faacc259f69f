"""The paper's equations in plain torch: importance, budget, selection. Oracle, CPU path and documentation.

Every Triton kernel has such a twin, here or in `reference_` and its own name: the two take the same arguments and
return the same values, and kernels are tested against their twins. Letters: S sequences, L block length, T rows that
enter a step, N rows that are kept, H query heads, Hkv key/value heads, D head size, B pages of the KV cache, G tokens a
page, P page-table columns.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['budget', 'importance', 'importance_partial', 'select']

# ceil(alpha * mean) is meant over the reals: a product such as 1.1 * 10 must not become 12 through its last bit. Sums
# and counts are at most 64: for alphas of up to four decimals no true fraction is this close above an integer.
_CEIL_SLACK = 1e-7


def importance(query: Tensor, key: Tensor, candidates: Tensor, scale: float) -> Tensor:
    """How much attention each masked token receives from the masked tokens of its block (FOCUS, eq. 3 and 4).

    Scores of neighbours in the list of masked tokens are max-pooled (window 3) before the softmax; heads and queries
    are summed. History and decoded tokens take no part.

    Args:
        query: [T, H, D] after q-norm and RoPE.
        key: [T, Hkv, D] after k-norm and RoPE.
        candidates: [S, L] int64, row of the j-th masked token of each sequence in block order, -1 beyond the last.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [S, L] float32, 0 beyond the last masked token. A sequence's values sum to (its masked tokens) * H.
    """
    partial = importance_partial(query, key, candidates, scale)
    total = torch.zeros_like(partial[:, 0])
    for kv_head in range(partial.size(1)):  # a fixed order: the same q and k bits give the same sum in any batch
        total = total + partial[:, kv_head]
    return total


def importance_partial(query: Tensor, key: Tensor, candidates: Tensor, scale: float,
                       out: Tensor | None = None) -> Tensor:
    """The importance by key head, [S, Hkv, L] float32; see :func:`importance`. Written to `out` if that is given."""
    valid = candidates >= 0
    rows = candidates.clamp_min(0)
    sequences, length = candidates.shape
    kv_heads = key.size(1)
    groups = query.size(1) // kv_heads
    # one matrix product a sequence and key head: einsum chooses its product by the number of sequences, and with it the
    # last bits; contiguous operands, because a view of a single sequence has other strides
    queries = query[rows].float().view(sequences, length, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(sequences * kv_heads, groups * length, -1).contiguous()
    keys = key[rows].float().permute(0, 2, 3, 1).reshape(sequences * kv_heads, -1, length).contiguous()
    scores = torch.bmm(queries, keys).view(sequences, kv_heads, groups, length, length) * scale
    hidden = ~valid[:, None, None, None, :]
    scores = scores.masked_fill(hidden, float('-inf'))
    left = F.pad(scores[..., :-1], (1, 0), value=float('-inf'))
    right = F.pad(scores[..., 1:], (0, 1), value=float('-inf'))
    pooled = torch.maximum(scores, torch.maximum(left, right)).masked_fill(hidden, float('-inf'))
    # a sequence without masked tokens has no finite score: its NaN columns are dropped by the masks below
    received = pooled.softmax(-1).masked_fill(~valid[:, None, None, :, None], 0).sum(3)
    total = torch.zeros_like(received[:, :, 0])
    for group in range(groups):
        total = total + received[:, :, group]
    total = total.masked_fill(~valid[:, None], 0)
    return total if out is None else out.copy_(total)


def budget(masked: Tensor, decoded: Tensor, steps: Tensor, alpha: float) -> Tensor:
    """How many masked tokens a sequence may keep in this step (FOCUS, eq. 5).

    Args:
        masked: [S] masked tokens of the block.
        decoded: [S] tokens decoded so far in this block by decode steps.
        steps: [S] decode steps of this block that decoded at least one token; 0 counts as a mean of one token a step.
        alpha: at least 1.

    Returns:
        [S] int64, min(masked, max(1, ceil(alpha * mean))); 0 where nothing is masked.
    """
    mean = torch.where(steps > 0, decoded.double() / steps.clamp_min(1).double(), 1.0).clamp_min(1.0)
    return torch.minimum(masked.long(), torch.ceil(mean * alpha - _CEIL_SLACK).long().clamp_min(1))


def select(delta: Tensor, positions: Tensor, budgets: Tensor, progress: Tensor, paper_rules: bool = True) -> Tensor:
    """Which masked tokens stay in the batch (FOCUS, section 3.3 and its three rules).

    The kept set is {delta >= mean + std} where that has at least K members, else the K largest (ties: smaller position
    first). Then, in this order: the masked left neighbour of a kept token is kept (one hop); a sequence that would keep
    nothing keeps all; every masked token right of `progress` and left of the rightmost kept one is kept, because its KV
    does not exist yet in the later layers. A sequence with no more than K masked tokens keeps all.

    Args:
        delta: [S, L] float32, ranking of the j-th masked token (importance in layer 1 minus layer 0).
        positions: [S, L] int64, block position of the j-th masked token, -1 beyond the last.
        budgets: [S] int64, K.
        progress: [S] rightmost block position that has been through all layers in this block, -1 if none.
        paper_rules: False leaves out the deviation threshold and the left-neighbour rule (ablations, fixed budgets).

    Returns:
        [S, L] bool, indexed like `delta`.
    """
    valid = positions >= 0
    count = valid.sum(1, keepdim=True)
    ranked = delta.masked_fill(~valid, float('-inf'))
    beats = (ranked[:, None, :] > ranked[:, :, None]) | (
        (ranked[:, None, :] == ranked[:, :, None]) & (positions[:, None, :] < positions[:, :, None]))
    rank = (beats & valid[:, None, :]).sum(-1)
    keep = valid & (rank < budgets[:, None])
    if paper_rules:
        number = count.clamp_min(1).double()
        values = delta.masked_fill(~valid, 0).double()
        mean = values.sum(1, keepdim=True) / number
        deviation = ((values - mean).square().masked_fill(~valid, 0).sum(1, keepdim=True) / number).sqrt()
        likely = valid & (delta.double() >= mean + deviation)
        base = torch.where(likely.sum(1, keepdim=True) >= budgets[:, None], likely, keep)
        adjacent = positions[:, 1:] - positions[:, :-1] == 1
        keep = base.clone()
        keep[:, :-1] |= base[:, 1:] & adjacent & valid[:, 1:]
    keep = torch.where(keep.any(1, keepdim=True), keep, valid)
    rightmost = positions.masked_fill(~keep, -1).amax(1, keepdim=True)
    keep = keep | (valid & (positions < rightmost) & (positions > progress[:, None]))
    return torch.where(count > budgets[:, None], keep, valid)
