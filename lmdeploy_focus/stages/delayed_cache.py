"""Neighbour-aware delayed cache: when a position's KV counts as final (FOCUS, section 3.5)."""
from dataclasses import replace

import torch
from torch import Tensor

from .state import FocusState, pack_bits, unpack_bits
from .view import MASKED, UNMASKED


def entering(state: FocusState, mask: Tensor, rule: str, full_commit: bool) -> Tensor:
    """Which block positions enter the step, [S, L] bool, at least one a sequence.

    Args:
        state: of S sequences.
        mask: [S, L] uint8, before the step.
        rule: 'delayed-neighbour', 'delayed' or 'off'.
        full_commit: a finished block is run once more as a whole (option focus_commit='full').
    """
    if rule == 'off':
        return torch.ones_like(mask, dtype=torch.bool)
    uncached = unpack_bits(state.uncached, mask.size(1))
    whole = ~uncached.any(1)
    if full_commit:
        whole = whole | (mask == UNMASKED).all(1)
    return uncached | whole[:, None]


def visible(history: Tensor, rightmost: Tensor, state: FocusState, rule: str) -> Tensor:
    """How many keys the rows of a sequence see, [S] int64.

    `rightmost` [S] is the largest block position that runs the layer. By rule 'progress' no position that has been
    through the layers is ever hidden; by 'reference' the view ends at `rightmost`, as in the authors' code.
    """
    last = rightmost if rule == 'reference' else torch.maximum(rightmost, state.progress)
    return history + last + 1


def advance(state: FocusState, mask_in: Tensor, mask_out: Tensor, rightmost: Tensor, rule: str) -> FocusState:
    """The state after a step.

    A position freezes after the first step in which it and its right neighbour were both decoded on input ('delayed':
    it alone); the last position of a block counts its neighbour as decoded. Budget statistics count this step's tokens.

    Args:
        state: before the step.
        mask_in, mask_out: [S, L] uint8, before and after the step.
        rightmost: [S] largest block position that ran all layers.
        rule: 'delayed-neighbour', 'delayed' or 'off'.
    """
    final = mask_in != MASKED
    if rule == 'delayed-neighbour':
        final = final & torch.cat([final[:, 1:], torch.ones_like(final[:, :1])], 1)
    newly = ((mask_in == MASKED) & (mask_out == UNMASKED)).sum(1)
    return replace(
        state,
        uncached=state.uncached if rule == 'off' else state.uncached & ~pack_bits(final),
        progress=torch.maximum(state.progress, rightmost),
        decoded=state.decoded + newly,
        steps=state.steps + (newly > 0),
    )
