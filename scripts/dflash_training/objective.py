"""The loss of a batch: blocks after random anchors, drafted from the target's features."""
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eval.demo_models.network import Draft, rope_table

from .blocks import Blocks, cut_blocks, decay, draw_anchors, visible
from .prompts import Sample
from .target import Target, pad

# Logits held at once, in fp32 a gigabyte: more rows are done piece by piece, and again in the backward pass.
_LOGITS = 1 << 28


@dataclass(frozen=True)
class Outcome:
    """Of one step.

    loss: fp32 scalar, the weighted mean cross entropy.
    right, counted: fp32 [Q - 1], drafted tokens that are the label, and labels, by slot.
    """

    loss: Tensor
    right: Tensor
    counted: Tensor


def token_losses(target: Target, hidden: Tensor, labels: Tensor, most: int = _LOGITS) -> tuple[Tensor, Tensor]:
    """Cross entropy under the target's head, and whether the best token is the label.

    Args:
        hidden: [N, C]; labels: int64 [N].
        most: logits held at once.

    Returns:
        fp32 [N] and bool [N].
    """
    def piece(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = target.logits(rows).float()
        return F.cross_entropy(logits, wanted, reduction='none'), logits.detach().argmax(-1) == wanted

    size = max(1, most // target.plan.shape.vocabulary)
    if len(hidden) <= size:
        return piece(hidden, labels)
    parts = [checkpoint(piece, rows, wanted, use_reentrant=False)
             for rows, wanted in zip(hidden.split(size), labels.split(size), strict=True)]
    return torch.cat([loss for loss, _ in parts]), torch.cat([right for _, right in parts])


class Objective:
    """Computes losses of a drafter.

    Args:
        target, draft: on one device; positions: up to which the rotary embedding is tabulated.
        anchors: blocks of a sequence.
    """

    def __init__(self, target: Target, draft: Draft, anchors: int, positions: int) -> None:
        self.target, self.draft, self.anchors = target, draft, anchors
        plan = target.plan
        self.cos, self.sin = rope_table(positions, plan.shape.head_size, plan.shape.rope_theta, target.device)
        self.decay = decay(plan.block_size, target.device)

    def batch(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids int64 [S, T], which are real, and which belong to the answer, both bool [S, T]."""
        ids, real = pad([(*sample.prompt, *sample.answer) for sample in samples], self.target.filler,
                        self.target.device)
        starts = torch.tensor([len(sample.prompt) for sample in samples], device=ids.device)
        return ids, real, real & (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None])

    def hidden(self, features: list[Tensor], blocks: Blocks, anchors: Tensor) -> Tensor:
        """The drafter's normed output at the drafted slots.

        Args:
            features: each [S, T, C]; anchors: int64 [S, A].

        Returns:
            [S, A, Q - 1, C].
        """
        length, flat = features[0].shape[1], blocks.positions.flatten(1)
        hidden = self.draft(self.target.embed(blocks.ids.flatten(1)), features, (self.cos[flat], self.sin[flat]),
                            (self.cos[None, :length], self.sin[None, :length]),
                            visible(anchors, length, blocks.ids.shape[-1]))
        return hidden.view(*blocks.ids.shape, -1)[:, :, 1:]

    def __call__(self, samples: Sequence[Sample], generator: torch.Generator | None = None) -> Outcome:
        """The outcome of a batch; `generator` draws the anchors."""
        plan = self.target.plan
        ids, real, answer = self.batch(samples)
        longest = max(len(sample.answer) for sample in samples)
        anchors, possible = draw_anchors(answer, min(self.anchors, max(1, longest - 1)), generator)
        blocks = cut_blocks(ids, answer, anchors, possible, plan.block_size, plan.mask_token)
        hidden = self.hidden(self.target.features(ids, real, self.draft.target_layers), blocks, anchors)
        # Only rows with a label go through the head, by far the widest product of a small drafter.
        counted = blocks.counted
        losses, right = token_losses(self.target, hidden[counted], blocks.labels[counted])
        weights = self.decay.expand(counted.shape)[counted]
        slots = torch.arange(plan.block_size - 1, device=ids.device).expand(counted.shape)[counted]
        by_slot = torch.zeros(plan.block_size - 1, device=ids.device).index_add(0, slots, right.float())
        return Outcome((losses * weights).sum() / weights.sum().clamp_min(1e-6), by_slot,
                       counted.sum((0, 1)).float())
