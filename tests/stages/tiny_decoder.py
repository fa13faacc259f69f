"""A random decoder of three layers in plain torch, as the stages ask for it.

Matrix products are done in float64 and rounded once, so that a row's float32 result does not depend on how many other
rows there are: what still differs between two batches is the stages' doing.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdeploy_focus.stages.decoder import KVCache, Rotary

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, VOCABULARY, MASK_TOKEN = 3, 32, 4, 2, 16, 24, 23


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

    def queries(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Up to q and k."""
        self.seen.append(('queries', hidden.size(1)))
        residual = hidden if residual is None else hidden + residual
        rows = norm(residual[0])
        query, key, value = (product(rows, self.weights[name]).unflatten(1, (-1, SIZE)) for name in 'qkv')
        return rotate(norm(query), rotary), rotate(norm(key), rotary), value, residual

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
        self.head = weight(WIDTH, VOCABULARY) * 2
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

    def sample(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens of the rows [R, WIDTH] and their confidence; never the mask token."""
        logits = hidden.double() @ self.head.double()
        logits[:, MASK_TOKEN] = float('-inf')
        scores, tokens = logits.softmax(-1).max(-1)
        return tokens, scores.float()


def caches(page_number: int, page_size: int) -> list[KVCache]:
    """Empty caches; a slot that was never written holds a number that no sum survives."""
    shape = (page_number, page_size, KV_HEADS, SIZE)
    return [(torch.full(shape, 1e4), torch.full(shape, 1e4)) for _ in range(LAYERS)]
