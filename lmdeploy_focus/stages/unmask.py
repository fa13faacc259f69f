"""Unmasking: which of the sampled tokens are accepted (block diffusion's confidence rules, on the kept rows only)."""
from dataclasses import dataclass

import torch
from torch import Tensor

from .view import CACHED, MASKED, UNMASKED


@dataclass(frozen=True)
class UnmaskRule:
    """How many positions a step decides.

    Attributes:
        strategy: 'low_confidence_dynamic', 'low_confidence_static' or 'sequential'.
        threshold: dynamic: every candidate at least this confident is decided, and always the most confident one.
        denoising_steps: static and sequential: a block is decided in this many steps.
    """
    strategy: str
    threshold: float
    denoising_steps: int

    def tokens_per_step(self, length: int) -> int:
        """Positions a step of the static and sequential strategies, rounded up: no block takes more steps."""
        return -(-length // self.denoising_steps)


def confidence(logits: Tensor, tokens: Tensor) -> Tensor:
    """Softmax probability of the sampled tokens, [R, V] and [R] -> [R] float32, after temperature as in LMDeploy."""
    logits = logits.float()
    return (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()


def unmask(ids: Tensor, mask: Tensor, rows: Tensor, tokens: Tensor, scores: Tensor,
           rule: UnmaskRule) -> tuple[Tensor, Tensor]:
    """Accept tokens; a block that was complete on input becomes CACHED.

    Args:
        ids: [S, L] int64 token ids before the step.
        mask: [S, L] uint8 before the step.
        rows: [R] int64, sampled positions as s * L + position; those that are not masked, and -1, are ignored.
        tokens: [R] int64 sampled tokens.
        scores: [R] float32 their confidence.

    Returns:
        ids and mask after the step, new tensors.
    """
    length = mask.size(1)
    # one spare slot takes the rows that are none
    frame = torch.full((mask.numel() + 1, ), float('-inf'), device=mask.device)
    rows = torch.where(rows >= 0, rows, mask.numel())
    # logits that are not numbers rank last, but a block with nothing else still moves on
    frame[rows] = scores.nan_to_num(nan=-1.0)
    proposed = torch.cat([ids.flatten(), ids.new_zeros(1)])
    proposed[rows] = tokens
    proposed = proposed[:-1]
    score = frame[:-1].view_as(mask).masked_fill(mask != MASKED, float('-inf'))
    candidate = score > float('-inf')
    if rule.strategy == 'low_confidence_dynamic':
        best = torch.zeros_like(candidate).scatter(1, score.argmax(1, keepdim=True), True)
        accepted = candidate & (best | (score >= rule.threshold))
    elif rule.strategy == 'low_confidence_static':
        count = rule.tokens_per_step(length)
        best = score.sort(dim=1, descending=True, stable=True).indices[:, :count]  # ties: smaller position first
        accepted = candidate & torch.zeros_like(candidate).scatter(1, best, True)
    elif rule.strategy == 'sequential':
        masked = mask == MASKED
        accepted = candidate & (masked.cumsum(1) <= rule.tokens_per_step(length))
    else:
        raise ValueError(f'dllm_unmasking_strategy={rule.strategy!r} is not one of low_confidence_dynamic, '
                         'low_confidence_static, sequential')
    complete = (mask == UNMASKED).all(1, keepdim=True)
    new_mask = torch.where(complete, CACHED, torch.where(accepted, UNMASKED, mask)).to(mask.dtype)
    return torch.where(accepted, proposed.view_as(ids), ids), new_mask
