"""Importance, budget and selection of FOCUS (arXiv 2601.23278, section 3) for a batch of whole blocks.

Letters: S sequences, L block length, H heads, G key/value heads, D head size. Masked positions are given by a bool
[S, L]; everything is computed for all L positions and means something at the masked ones only.
"""
import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor


def importance(query: Tensor, key: Tensor, masked: Tensor) -> Tensor:
    """Attention that each masked token receives from the masked tokens of its block (equations 3 and 4).

    Args:
        query: [S, L, H, D]; key: [S, L, G, D], both after norm and rotary embedding.
        masked: bool [S, L].

    Returns:
        fp32 [S, L], 0 where not masked. Scores are max-pooled over neighbours in the list of masked positions, not over
        neighbours in the block.
    """
    length, heads, size = query.shape[1:]
    order = torch.argsort((~masked).to(torch.int8), dim=1, stable=True)
    valid = torch.arange(length, device=query.device)[None] < masked.sum(1)[:, None]
    query = query.float().gather(1, order[..., None, None].expand_as(query))
    key = key.float().gather(1, order[..., None, None].expand_as(key)).repeat_interleave(heads // key.shape[2], 2)
    scores = torch.einsum('sihd,sjhd->shij', query, key) * size ** -0.5
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~valid[:, None, None], lowest)
    left, right = F.pad(scores[..., :-1], (1, 0), value=lowest), F.pad(scores[..., 1:], (0, 1), value=lowest)
    pooled = torch.maximum(scores, torch.maximum(left, right))
    weights = pooled.masked_fill(~valid[:, None, None], lowest).softmax(-1)
    received = (weights * valid[:, None, :, None]).sum((1, 2)) * valid
    return torch.zeros_like(received).scatter(1, order, received)


def rank(score: Tensor, masked: Tensor) -> Tensor:
    """Rank of each masked position by score, 0 the highest, ties to the smaller position; L + 1 where not masked."""
    length = score.shape[1]
    index = torch.arange(length, device=score.device)
    ahead = (score[:, None, :] > score[:, :, None]) | (
        (score[:, None, :] == score[:, :, None]) & (index[None, None] < index[None, :, None]))
    return torch.where(masked, (ahead & masked[:, None, :]).sum(-1), length + 1)


def budget(masked: Tensor, decoded: Tensor, steps: Tensor, alpha: float) -> Tensor:
    """How many masked tokens are worth processing (equation 5).

    Args:
        masked: bool [S, L].
        decoded, steps: int [S], tokens decoded in this block so far and the steps that decoded at least one.
        alpha: at least 1. The product is rounded up over the real numbers, alpha taken as it is written in decimals.

    Returns:
        int64 [S], min(number masked, max(1, ceil(alpha * mean))); the mean is 1 before the first step.
    """
    factor = Fraction(str(alpha))
    rows = zip(masked.sum(1).tolist(), decoded.tolist(), steps.tolist(), strict=True)
    budgets = []
    for count, total, taken in rows:
        mean = max(Fraction(1), Fraction(total, taken)) if taken else Fraction(1)
        budgets.append(min(count, math.ceil(factor * mean)))
    return torch.tensor(budgets, dtype=torch.long, device=masked.device)


def select(score: Tensor, masked: Tensor, progress: Tensor, budgets: Tensor, paper_rules: bool) -> Tensor:
    """Which masked positions go through layers 2 and later.

    Args:
        score: fp32 [S, L]; the highest are kept.
        masked: bool [S, L].
        progress: int [S], the rightmost position that has been through all layers, -1 if none.
        budgets: int [S], K; a sequence with no more masked positions than that keeps all.
        paper_rules: whether more than K are kept if more lie a standard deviation above the mean, and with a position
            its left neighbour. The third rule always holds: between `progress` and the rightmost kept position
            everything is kept, as there is no KV of those positions to attend to.

    Returns:
        bool [S, L].
    """
    position = torch.arange(score.shape[1], device=score.device)[None]
    keep = masked & (rank(score, masked) < budgets[:, None])
    if paper_rules:
        count = masked.sum(1, keepdim=True).clamp_min(1)
        values = score.double()
        mean = (values * masked).sum(1, keepdim=True) / count
        deviation = (((values - mean).square() * masked).sum(1, keepdim=True) / count).sqrt()
        high = masked & (values >= mean + deviation)
        base = torch.where(high.sum(1, keepdim=True) >= budgets[:, None], high, keep)
        keep = base.clone()
        keep[:, :-1] |= base[:, 1:] & masked[:, :-1]
    keep = torch.where(keep.any(1, keepdim=True), keep, masked)
    rightmost = torch.where(keep, position, -1).amax(1, keepdim=True)
    keep |= masked & (position < rightmost) & (position > progress[:, None])
    return torch.where((masked.sum(1) > budgets)[:, None], keep, masked)
