"""A decode step one sequence at a time, with a flat list of keys and values: the golden model of `step.denoise`."""
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from lmdeploy_focus.stages.decoder import KVCache
from lmdeploy_focus.stages.step import StepOptions

from .. import oracle
from .tiny_decoder import LAYERS, MASK_TOKEN, TinyDecoder


@dataclass
class Sequence:
    """One sequence.

    Attributes:
        history: tokens before the block.
        ids, mask: of the block.
        block: its memory.
        caches: of each layer, keys and values by text position.
    """
    history: int
    ids: list[int]
    mask: list[int]
    block: oracle.Block
    caches: list[KVCache] = field(repr=False)

    def begin(self) -> None:
        """The next block."""
        length = len(self.ids)
        self.history += length
        self.ids, self.mask = [MASK_TOKEN] * length, [oracle.MASKED] * length
        self.block = oracle.Block(length, self.block.rule)


@dataclass
class Step:
    """What a step of one sequence does: entering and kept positions, importance delta, hidden states of kept rows."""
    entered: list[int]
    kept: list[int]
    delta: list[float]
    hidden: Tensor


class LayerRun:
    """One layer on some positions of a sequence."""

    def __init__(self, decoder: TinyDecoder, index: int, own: Sequence, positions: list[int], hidden: Tensor,
                 residual: Tensor | None) -> None:
        self.layer, self.own, self.cache, self.positions = decoder.layers[index], own, own.caches[index], positions
        places = torch.tensor([[own.history + p for p in positions]])
        self.query, self.key, value, self.residual = self.layer.queries(hidden, residual,
                                                                        decoder.rotary(hidden, places))
        for half, rows in zip(self.cache, (self.key, value), strict=True):
            half[places[0]] = rows

    def finish(self, kept: list[int], visible: int) -> tuple[Tensor, Tensor]:
        """Attention over the text's first `visible` positions and the rest of the layer, for the kept positions."""
        rows = [self.positions.index(p) for p in kept]
        keys, values = self.cache
        attended = oracle.attention(self.query[rows], keys[:visible], values[:visible], self.layer.scale).float()
        return self.layer.finish(attended, self.residual[:, rows])


def denoise(decoder: TinyDecoder, own: Sequence, options: StepOptions, evicting: bool) -> Step:
    """One step of one sequence, in the order of the paper."""
    entered = own.block.entering(own.mask, options.commit == 'full')

    def visible(positions: list[int]) -> int:
        return oracle.visible(own.history, positions[-1], own.block.progress, options.kv_visible)

    hidden = decoder.embed(torch.tensor([[own.ids[p] for p in entered]]))
    first = LayerRun(decoder, 0, own, entered, hidden, None)
    hidden, residual = first.finish(entered, visible(entered))
    second = LayerRun(decoder, 1, own, entered, hidden, residual)

    masked = [p for p in entered if own.mask[p] == oracle.MASKED]
    kept, delta = entered, []
    if evicting and masked:
        rows = [entered.index(p) for p in masked]
        before, after = (oracle.importance(run.query[rows], run.key[rows], run.layer.scale) for run in (first, second))
        delta = [later - earlier for later, earlier in zip(after, before, strict=True)]
        allowed = oracle.budget(len(masked), own.block.decoded, own.block.steps, Fraction(str(options.alpha)))
        allowed = allowed if options.keep is None else min(options.keep, len(masked))
        stays = oracle.select(delta, masked, allowed, own.block.progress, options.keep is None)
        evicted = {p for p, stay in zip(masked, stays, strict=True) if not stay}
        kept = [p for p in entered if p not in evicted]

    hidden, residual = second.finish(kept, visible(kept))
    for index in range(2, LAYERS):
        run = LayerRun(decoder, index, own, kept, hidden, residual)
        hidden, residual = run.finish(kept, visible(kept))
    return Step(entered, kept, delta, decoder.norm(hidden, residual)[0])


def settle(decoder: TinyDecoder, own: Sequence, step: Step, strategy: str, threshold: float) -> None:
    """Sample the masked kept rows, unmask, advance."""
    masked = [row for row, p in enumerate(step.kept) if own.mask[p] == oracle.MASKED]
    tokens, scores = decoder.sample(step.hidden[masked])
    sampled = {step.kept[row]: pair for row, pair in zip(masked, zip(tokens.tolist(), scores.tolist(), strict=True),
                                                         strict=True)}
    before = own.mask
    own.ids, own.mask = oracle.unmask(own.ids, before, sampled, strategy, threshold, 0)
    own.block.advance(before, own.mask, step.kept[-1])
