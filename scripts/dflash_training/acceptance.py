"""Acceptance length on held-out prompts: tokens that a verification step gives, the target's own token included.

The target verifies greedily, so what a decoding with the drafter commits is the target's own greedy answer. It is
decoded once; then a drafted block is accepted as far as it agrees with that answer. In exact arithmetic this gives the
numbers of `eval/demo_models/reference_dflash.py`, which runs the target on every block
(`tests/training/test_acceptance.py`).
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.demo_models.network import Draft, attend, rope_table

from .prompts import Sample
from .target import Target, pad


@dataclass(frozen=True)
class Acceptance:
    """Of one measurement.

    tokens: committed by verification steps; steps: how many there were.
    accepted: share of the steps that accepted slot k and all before it, by slot.
    """

    tokens: int
    steps: int
    accepted: tuple[float, ...]

    @property
    def length(self) -> float:
        """Tokens a verification step."""
        return self.tokens / max(1, self.steps)


class _Context:
    """Keys and values of a batch's context, computed once."""

    def __init__(self, target: Target, draft: Draft, samples: Sequence[Sample]) -> None:
        self.target, self.draft = target, draft
        ids, real = pad([(*sample.prompt, *sample.answer) for sample in samples], target.filler, target.device)
        self.length = ids.shape[1]
        tables = rope_table(self.length + draft.block_length, draft.shape.head_size, draft.shape.rope_theta,
                            target.device)
        self.cos, self.sin = tables
        context = draft.context(target.features(ids, real, draft.target_layers))
        self.layers = [layer.self_attn.key_value(context, self.cos[None, :self.length], self.sin[None, :self.length])
                       for layer in draft.layers]

    def keep(self, rows: Tensor) -> None:
        """Only those sequences from now on."""
        self.layers = [(key[rows], value[rows]) for key, value in self.layers]

    def propose(self, tokens: Tensor, anchors: Tensor, mask_token: int) -> Tensor:
        """Drafted tokens int64 [S, Q - 1] after the known tokens [S] at positions [S]."""
        positions = anchors[:, None] + torch.arange(self.draft.block_length, device=anchors.device)
        block = torch.full_like(positions, mask_token)
        block[:, 0] = tokens
        cos, sin = self.cos[positions], self.sin[positions]
        before = torch.arange(self.length, device=anchors.device) < anchors[:, None]
        seen = torch.cat([before, torch.ones_like(positions, dtype=torch.bool)], 1)[:, None, None]
        seen = seen.expand(-1, 1, positions.shape[1], -1)
        x = self.target.embed(block)
        for layer, (past_key, past_value) in zip(self.draft.layers, self.layers, strict=True):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, cos, sin)
            key, value = layer.self_attn.key_value(normed, cos, sin)
            x = layer.finish(x, attend(query, torch.cat([past_key, key], 1), torch.cat([past_value, value], 1), seen))
        return self.target.logits(self.draft.norm(x)[:, 1:]).argmax(-1)


@torch.no_grad()
def measure(target: Target, draft: Draft, samples: Sequence[Sample], mask_token: int, max_new: int,
            batch: int = 64) -> Acceptance:
    """Measure a drafter.

    Args:
        samples: with the target's greedy answers, each with a stop token or at least `max_new` + Q - 1 tokens long.
        mask_token: of the drafter.
        max_new: tokens after which a decoding takes no further step.
        batch: sequences at once.
    """
    tokens = steps = 0
    accepted = torch.zeros(draft.block_length, dtype=torch.long)
    ordered = sorted((sample for sample in samples if len(sample.answer) > 1), key=lambda sample: len(sample.answer))
    for start in range(0, len(ordered), batch):
        for given, right in _replay(_Context(target, draft, ordered[start:start + batch]),
                                    ordered[start:start + batch], mask_token, max_new):
            tokens, steps = tokens + given, steps + 1
            accepted[right] += 1
    reached = accepted.flip(0).cumsum(0).flip(0)[1:]
    return Acceptance(tokens, steps, tuple((reached / max(1, steps)).tolist()))


def _replay(context: _Context, samples: Sequence[Sample], mask_token: int, max_new: int) -> list[tuple[int, int]]:
    """Of every verification step the tokens that it gives and the drafted ones that it accepts."""
    device, size = context.target.device, context.draft.block_length
    answers, real = pad([sample.answer for sample in samples], -1, device)
    # No draft is -1: what lies behind the end is never accepted.
    answers = torch.cat([answers, answers.new_full((len(answers), size), -1)], 1)
    starts = torch.tensor([len(sample.prompt) for sample in samples], device=device)
    lengths = real.sum(1)
    count = torch.ones_like(lengths)        # known tokens of each answer; the first comes from the prompt
    outcomes: list[tuple[int, int]] = []
    for _ in range(max_new):
        active = (count < lengths) & (count < max_new)
        rows = active.nonzero()[:, 0]
        if not len(rows):
            break
        if len(rows) <= len(active) * 0.75:
            context.keep(rows)
            answers, starts, lengths, count = answers[rows], starts[rows], lengths[rows], count[rows]
            active = active[rows]
        known = answers.gather(1, count[:, None] - 1)[:, 0]
        draft = context.propose(known, starts + count - 1, mask_token)
        labels = answers.gather(1, count[:, None] + torch.arange(size - 1, device=device))
        right = (draft == labels).long().cumprod(1).sum(1)
        given = torch.minimum(right + 1, lengths - count) * active
        count = count + given
        outcomes += zip(given[active].tolist(), right[active].tolist(), strict=True)
    return outcomes


def report(found: Acceptance) -> dict[str, object]:
    """As `training.json` has it."""
    length = found.length
    return {'acceptance_length': round(length, 4) if math.isfinite(length) else None, 'tokens': found.tokens,
            'steps': found.steps, 'accepted_by_slot': [round(share, 4) for share in found.accepted]}
