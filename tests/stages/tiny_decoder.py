"""A random decoder of three layers in plain torch, as the stages ask for it.

Matrix products are done in float64 and rounded once, so that a row's float32 result does not depend on how many other
rows there are: what still differs between two batches is the stages' doing.
"""
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy_focus.kernels.dispatch import kernels_for
from torch import Tensor

from lmdeploy_focus.stages.decoder import KVCache, Model, Rotary

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, VOCABULARY, MASK_TOKEN = 3, 32, 4, 2, 16, 24, 23
UNWRITTEN = 1e4  # in a slot of the cache that was never written: no sum survives it


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight, rounded once."""
    return (rows.double() @ weight.double()).float()


def norm(hidden: Tensor) -> Tensor:
    """RMS norm without a weight."""
    wide = hidden.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).float()


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """RoPE, halves rotated."""
    cos, sin = (table[:, None] for table in rotary)
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class TinyLayer:
    """One layer; `seen` records how many rows entered and left it."""
    weights: dict[str, Tensor]
    seen: list[tuple[str, int]]
    scale: float = SIZE**-0.5

    def project(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and residual; nothing is written."""
        residual = hidden if residual is None else hidden + residual
        rows = norm(residual[0])
        query, key, value = (product(rows, self.weights[name]).unflatten(1, (-1, SIZE)) for name in 'qkv')
        return rotate(norm(query), rotary), rotate(norm(key), rotary), value, residual

    def queries(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary, cache: KVCache, pages: Tensor,
                offsets: Tensor, kernels: Any, return_key: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Up to q and k, and the write to the cache; padded rows, of page -1, go nowhere."""
        self.seen.append(('queries', hidden.size(1)))
        query, key, value, residual = self.project(hidden, residual, rotary)
        real = pages >= 0
        for half, rows in zip(cache, (key, value), strict=True):
            half[pages[real], offsets[real]] = rows[real]
        return query, key if return_key else None, residual

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From attention on."""
        self.seen.append(('finish', attended.size(0)))
        residual = residual + product(attended.flatten(1), self.weights['o'])[None]
        inner = product(norm(residual), self.weights['up']).tanh()
        return product(inner, self.weights['down']), residual


class TinyDecoder:
    """A :class:`lmdeploy_focus.stages.decoder.Decoder` with a head."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=random) * (2 / rows**.5)

        self.table = torch.randn(VOCABULARY, WIDTH, generator=random)
        self.weight = weight(WIDTH, VOCABULARY) * 2
        shapes = {'q': (WIDTH, HEADS * SIZE), 'k': (WIDTH, KV_HEADS * SIZE), 'v': (WIDTH, KV_HEADS * SIZE),
                  'o': (HEADS * SIZE, WIDTH), 'up': (WIDTH, 2 * WIDTH), 'down': (2 * WIDTH, WIDTH)}
        self.layers = [TinyLayer({name: weight(*shape) for name, shape in shapes.items()}, []) for _ in range(LAYERS)]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings."""
        return self.table[input_ids]

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Rotary:
        """Cosines and sines, [T, SIZE / 2] each."""
        angle = position_ids[0].double()[:, None] * 100.0**(-torch.arange(SIZE // 2).double() / (SIZE // 2))
        return angle.cos().float(), angle.sin().float()

    def norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The final norm."""
        return norm(hidden + residual)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [R, VOCABULARY] of hidden states [R, WIDTH]; the mask token is the most likely one."""
        logits = product(hidden, self.weight)
        logits[:, MASK_TOKEN] = 50.
        return logits

    def model(self, caches: list[KVCache]) -> Model:
        """What a step computes with, on the CPU's kernels."""
        return Model(self, self.head, caches, kernels_for('cpu'))


def caches(page_number: int, page_size: int) -> list[KVCache]:
    """Caches in which nothing is written."""
    shape = (page_number, page_size, KV_HEADS, SIZE)
    return [(torch.full(shape, UNWRITTEN), torch.full(shape, UNWRITTEN)) for _ in range(LAYERS)]
