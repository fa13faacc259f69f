"""A dense KV cache and the two ways of filling it; shared by the reference decoders."""
from collections.abc import Sequence

import torch
from torch import Tensor

from .network import Decoder, Shape, attend
from .tokenizer import END_OF_TEXT


def pad_prompts(prompts: Sequence[Sequence[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded token ids, int64 [S, width], and lengths, int64 [S]."""
    ids = torch.full((len(prompts), width), END_OF_TEXT, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, :len(prompt)] = torch.tensor(prompt)
    return ids.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)


def until_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens before the first stop token, and whether there is one."""
    for index, token in enumerate(ids):
        if token in stop_ids:
            return list(ids[:index]), True
    return list(ids), False


def reach(length: int, limit: int, step: int = 64) -> int:
    """How much of the cache is read: a multiple of `step`, so that few shapes occur."""
    return min(limit, -(-length // step) * step)


class KVCache:
    """Keys and values of every layer, each [S, positions, G, D]."""

    def __init__(self, layers: int, sequences: int, positions: int, shape: Shape, device: torch.device,
                 dtype: torch.dtype):
        size = (sequences, positions, shape.kv_heads, shape.head_size)
        self.keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(layers)]
        self.rows = torch.arange(sequences, device=device)[:, None]

    def write(self, layer: int, positions: Tensor, key: Tensor, value: Tensor, written: Tensor | None = None) -> None:
        """Store [S, T, G, D] at positions [S, T]; where `written` [S, T] is False, what was there stays."""
        if written is not None:
            keep = written[..., None, None]
            key = torch.where(keep, key, self.keys[layer][self.rows, positions])
            value = torch.where(keep, value, self.values[layer][self.rows, positions])
        self.keys[layer][self.rows, positions] = key
        self.values[layer][self.rows, positions] = value

    def take(self, sequences: Tensor) -> None:
        """Keep the sequences whose index is given."""
        self.keys = [key[sequences] for key in self.keys]
        self.values = [value[sequences] for value in self.values]
        self.rows = self.rows[:len(sequences)]

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions."""
        return self.keys[layer][:, :length], self.values[layer][:, :length]


def prefill(model: Decoder, cache: KVCache, ids: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
            collect: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
    """Dense pass over right-padded prompts [S, T]: normed hidden states, and the outputs of the layers in `collect`."""
    tokens = ids.shape[1]
    x = model.embed(ids, model.dtype)
    cos, sin = cos[None, :tokens], sin[None, :tokens]
    features = []
    for index, layer in enumerate(model.layers):
        normed = layer.input_layernorm(x)
        query = layer.self_attn.query(normed, cos, sin)
        key, value = layer.self_attn.key_value(normed, cos, sin)
        cache.keys[index][:, :tokens], cache.values[index][:, :tokens] = key, value
        x = layer.finish(x, attend(query, key, value, mask))
        if index in collect:
            features.append(x)
    return model.norm(x), features


def extend(model: Decoder, cache: KVCache, ids: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, length: int,
           collect: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
    """Causal step of a few tokens [S, T] a sequence at positions [S, T], reading `length` positions of the cache."""
    x = model.embed(ids, model.dtype)
    cos, sin = cos[positions], sin[positions]
    mask = (torch.arange(length, device=ids.device)[None, None] <= positions[..., None])[:, None]
    features = []
    for index, layer in enumerate(model.layers):
        normed = layer.input_layernorm(x)
        query = layer.self_attn.query(normed, cos, sin)
        key, value = layer.self_attn.key_value(normed, cos, sin)
        cache.write(index, positions, key, value)
        x = layer.finish(x, attend(query, *cache.read(index, length), mask))
        if index in collect:
            features.append(x)
    return model.norm(x), features
