"""A decode step one sequence at a time, with a flat list of keys and values: the golden model of `stages.step`.

A finished block is committed by a forward of its own, before the next block's first step.
"""
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from lmdeploy_focus.stages.decoder import KVCache
from lmdeploy_focus.stages.step_options import StepOptions

from .. import oracle
from ..kernels.block_life import Life
from .blocks import must_keep
from .tiny_decoder import LAYERS, MASK_TOKEN, TinyDecoder


class TinyLife(Life):
    """A life with the tiny decoder's mask token."""

    def begin(self) -> None:
        """The next block."""
        super().begin()
        self.ids = [MASK_TOKEN] * self.rules.length


@dataclass
class Sequence:
    """One sequence.

    Attributes:
        life: its block and text.
        caches: of each layer, keys and values by text position.
    """
    life: TinyLife
    caches: list[KVCache] = field(repr=False)


@dataclass
class Step:
    """What a step of one sequence does.

    Attributes:
        entered, kept: block positions, the finished block's (less L) before the current one's.
        importance: of the masked ones in layers 0 and 1, none in a step that does not evict.
        hidden: final hidden states of the kept ones.
    """
    entered: list[int]
    kept: list[int]
    importance: list[list[float]]
    hidden: Tensor


class LayerRun:
    """One layer on some positions of a sequence."""

    def __init__(self, decoder: TinyDecoder, index: int, own: Sequence, positions: list[int], hidden: Tensor,
                 residual: Tensor | None) -> None:
        self.layer, self.own, self.cache, self.positions = decoder.layers[index], own, own.caches[index], positions
        places = torch.tensor([[own.life.history + p for p in positions]])
        self.query, self.key, value, self.residual = self.layer.project(hidden, residual,
                                                                        decoder.rotary(hidden, places))
        for half, rows in zip(self.cache, (self.key, value), strict=True):
            half[places[0]] = rows

    def finish(self, kept: list[int], visible: int) -> tuple[Tensor, Tensor]:
        """Attention over the text's first `visible` positions and the rest of the layer, for the kept positions."""
        rows = [self.positions.index(p) for p in kept]
        keys, values = self.cache
        attended = oracle.attention(self.query[rows], keys[:visible], values[:visible], self.layer.scale).float()
        return self.layer.finish(attended, self.residual[:, rows])


def commit(decoder: TinyDecoder, own: Sequence) -> tuple[list[int], Tensor]:
    """What is left of the finished block through all layers: its positions and their hidden states."""
    life = own.life
    positions = [p - life.rules.length for p in sorted(life.pending)]
    if not positions:
        return positions, torch.zeros(0, decoder.table.size(1))
    hidden = decoder.embed(torch.tensor([[life.committing[p] for p in positions]]))
    residual = None
    for index in range(LAYERS):
        run = LayerRun(decoder, index, own, positions, hidden, residual)
        hidden, residual = run.finish(positions, life.history)
    return positions, decoder.norm(hidden, residual)[0]


def denoise(decoder: TinyDecoder, own: Sequence, options: StepOptions, evicting: bool) -> Step:
    """One step of one sequence, in the order of the paper."""
    life = own.life
    pending, committed = commit(decoder, own)
    entered = sorted(life.entering())

    def visible(positions: list[int]) -> int:
        return oracle.visible(life.history, positions[-1], life.block.progress, options.kv_visible)

    hidden = decoder.embed(torch.tensor([[life.ids[p] for p in entered]]))
    first = LayerRun(decoder, 0, own, entered, hidden, None)
    hidden, residual = first.finish(entered, visible(entered))
    second = LayerRun(decoder, 1, own, entered, hidden, residual)

    masked = [p for p in entered if p in life.waiting]
    kept, importance = entered, []
    if evicting:
        rows = [entered.index(p) for p in masked]
        importance = [oracle.importance(run.query[rows], run.key[rows], run.layer.scale) for run in (first, second)]
        delta = [later - earlier for earlier, later in zip(*importance, strict=True)]
        allowed = oracle.budget(len(masked), life.block.decoded, life.block.steps, Fraction(3, 2))
        allowed = allowed if options.keep is None else min(options.keep, len(masked))
        stays = oracle.select(delta, masked, allowed, life.block.progress, options.keep is None)
        chosen = {p for p, stay in zip(masked, stays, strict=True) if stay} | must_keep(life)
        kept = [p for p in entered if p in chosen]

    hidden, residual = second.finish(kept, visible(kept))
    for index in range(2, LAYERS):
        run = LayerRun(decoder, index, own, kept, hidden, residual)
        hidden, residual = run.finish(kept, visible(kept))
    hidden = torch.cat([committed, decoder.norm(hidden, residual)[0]])
    return Step(pending + entered, pending + kept, importance, hidden)


def settle(decoder: TinyDecoder, own: Sequence, step: Step) -> dict[str, object]:
    """Sample the masked kept rows, unmask, advance: the report."""
    masked = [row for row, p in enumerate(step.kept) if p in own.life.waiting]
    logits = decoder.head(step.hidden[masked]).double()
    logits[:, MASK_TOKEN] = float('-inf')
    scores, tokens = logits.softmax(-1).max(-1)
    drawn = zip(tokens.tolist(), scores.float().tolist(), strict=True)
    sampled = {step.kept[row]: pair for row, pair in zip(masked, drawn, strict=True)}
    return own.life.step(*({p for p in rows if p >= 0} for rows in (step.entered, step.kept)), sampled)
