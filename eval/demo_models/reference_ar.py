"""Greedy autoregressive decoding in plain torch."""
from collections.abc import Sequence

import torch

from .network import Decoder, rope_table
from .reference_cache import KVCache, extend, pad_prompts, prefill, reach, until_stop
from .tokenizer import END_OF_TEXT, STOP_IDS


@torch.inference_mode()
def decode_ar(model: Decoder, prompts: Sequence[Sequence[int]], max_new: int) -> list[tuple[list[int], bool]]:
    """For each prompt the tokens before the stop token, at most `max_new`, and whether it stopped by itself."""
    device = model.device
    width = max(map(len, prompts))
    ids, lengths = pad_prompts(prompts, width, device)
    sequences, positions = len(prompts), width + max_new
    cos, sin = rope_table(positions, model.shape.head_size, model.shape.rope_theta, device)
    cache = KVCache(len(model.layers), sequences, positions, model.shape, device, model.dtype)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
    hidden, _ = prefill(model, cache, ids, cos, sin, causal)
    token = model.logits(hidden[torch.arange(sequences, device=device), lengths - 1]).argmax(-1)
    stops = torch.tensor(STOP_IDS, device=device)
    text = torch.full((sequences, max_new), END_OF_TEXT, dtype=torch.long, device=device)
    done = torch.zeros(sequences, dtype=torch.bool, device=device)
    for step in range(max_new):
        text[:, step] = torch.where(done, END_OF_TEXT, token)
        done |= torch.isin(token, stops)
        # A look at the device every 16 steps is cheaper than one every step.
        if step == max_new - 1 or (step % 16 == 15 and bool(done.all())):
            break
        hidden, _ = extend(model, cache, token[:, None], (lengths + step)[:, None], cos, sin,
                           reach(width + step + 1, positions))
        token = model.logits(hidden[:, 0]).argmax(-1)
    return [until_stop(row, STOP_IDS) for row in text.tolist()]
