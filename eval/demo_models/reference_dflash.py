"""Greedy DFlash decoding in plain torch: draft a block, verify it, keep the longest right beginning.

DFlash, arXiv 2602.06036. Letters: S sequences, Q block length (one known token and Q - 1 drafted ones).
"""
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .network import Decoder, Draft, attend, rope_table
from .reference_cache import KVCache, extend, pad_prompts, prefill, reach, until_stop
from .tokenizer import END_OF_TEXT, MASK, STOP_IDS


@dataclass(frozen=True)
class Drafted:
    """One answer.

    Attributes:
        tokens: before the stop token.
        stopped: whether there was a stop token.
        verified: tokens that verification steps gave, the stop token included, those after it not.
        steps: verification steps; verified / steps is the acceptance length.
    """

    tokens: list[int]
    stopped: bool
    verified: int
    steps: int


class _Run:
    """Caches and text of one batch."""

    def __init__(self, model: Decoder, draft: Draft, prompts: Sequence[Sequence[int]], max_new: int):
        self.model, self.draft, self.max_new = model, draft, max_new
        device, block = model.device, draft.block_length
        width = max(map(len, prompts))
        ids, self.lengths = pad_prompts(prompts, width, device)
        # A row may overshoot max_new by a block, and that block by one more.
        self.positions = width + max_new + 2 * block + 1
        self.cos, self.sin = rope_table(self.positions, model.shape.head_size, model.shape.rope_theta, device)
        sequences = len(prompts)
        self.cache = KVCache(len(model.layers), sequences, self.positions, model.shape, device, model.dtype)
        self.draft_cache = KVCache(len(draft.layers), sequences, self.positions, draft.shape, device, model.dtype)
        self.rows = torch.arange(sequences, device=device)
        self.offsets = torch.arange(block, device=device)
        self.stops = torch.tensor(STOP_IDS, device=device)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        hidden, features = prefill(model, self.cache, ids, self.cos, self.sin, causal, draft.target_layers)
        self.store(features, torch.arange(width, device=device)[None].expand(sequences, width))
        self.text = torch.full((sequences, max_new + block + 1), END_OF_TEXT, dtype=torch.long, device=device)
        self.text[:, 0] = model.logits(hidden[self.rows, self.lengths - 1]).argmax(-1)
        # Tokens in `text`; the last of them has not been through the target yet.
        self.count = torch.ones(sequences, dtype=torch.long, device=device)
        self.steps = torch.zeros(sequences, dtype=torch.long, device=device)
        self.stopped = torch.isin(self.text[:, 0], self.stops)

    def store(self, features: list[Tensor], positions: Tensor) -> None:
        """Write the drafter's context keys and values of target features at positions [S, T]."""
        context = self.draft.context(features)
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.draft.layers):
            self.draft_cache.write(index, positions, *layer.self_attn.key_value(context, cos, sin))

    def propose(self, block: Tensor, positions: Tensor, length: int) -> Tensor:
        """Drafted tokens [S, Q - 1]; the block sees the context before it and all of itself."""
        x = self.model.embed(block, self.model.dtype)
        cos, sin = self.cos[positions], self.sin[positions]
        seen = torch.arange(length, device=block.device)[None] < positions[:, :1]
        own = torch.ones(len(block), block.shape[1], dtype=torch.bool, device=block.device)
        mask = torch.cat([seen, own], -1)[:, None, None].expand(-1, 1, block.shape[1], -1)
        for index, layer in enumerate(self.draft.layers):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, cos, sin)
            key, value = layer.self_attn.key_value(normed, cos, sin)
            past_key, past_value = self.draft_cache.read(index, length)
            x = layer.finish(x, attend(query, torch.cat([past_key, key], 1), torch.cat([past_value, value], 1), mask))
        return self.model.logits(self.draft.norm(x)[:, 1:]).argmax(-1)

    def step(self, active: Tensor) -> None:
        """Draft, verify and accept once, for the rows in `active` [S]."""
        start = self.lengths + self.count - 1
        length = reach(int(start.max()) + len(self.offsets), self.positions)
        positions = start[:, None] + self.offsets
        block = torch.full_like(positions, MASK)
        block[:, 0] = self.text[self.rows, self.count - 1]
        block[:, 1:] = self.propose(block, positions, length)
        hidden, features = extend(self.model, self.cache, block, positions, self.cos, self.sin, length,
                                  self.draft.target_layers)
        target = self.model.logits(hidden).argmax(-1)
        self.store(features, positions)
        accepted = (block[:, 1:] == target[:, :-1]).long().cumprod(1).sum(1)
        new = torch.cat([block[:, 1:], block[:, :1]], 1)
        new[self.rows, accepted] = target[self.rows, accepted]
        valid = (self.offsets <= accepted[:, None]) & active[:, None]
        stops = torch.isin(new, self.stops) & valid
        last = torch.where(stops.any(1), stops.long().argmax(1), accepted)
        valid &= self.offsets <= last[:, None]
        places = (self.count[:, None] + self.offsets).clamp_max(self.text.shape[1] - 1)
        self.text[self.rows[:, None], places] = torch.where(valid, new, self.text[self.rows[:, None], places])
        self.count += valid.sum(1)
        self.steps += active.long()
        self.stopped |= stops.any(1) & active


@torch.inference_mode()
def decode_dflash(model: Decoder, draft: Draft, prompts: Sequence[Sequence[int]], max_new: int) -> list[Drafted]:
    """Answers of the target, at most `max_new` tokens each; in exact arithmetic the same as `decode_ar`'s."""
    run = _Run(model, draft, prompts, max_new)
    while bool((active := ~run.stopped & (run.count < max_new)).any()):
        run.step(active)
    answers = []
    rows = zip(run.text.tolist(), run.count.tolist(), run.steps.tolist(), strict=True)
    for text, count, steps in rows:
        tokens, stopped = until_stop(text[:min(count, max_new)], STOP_IDS)
        answers.append(Drafted(tokens, stopped, count - 1, steps))
    return answers
