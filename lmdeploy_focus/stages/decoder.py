"""What the stages ask of a model: a decoder split between the queries of a layer and the rest of it."""
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

KVCache = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]


class Layer(Protocol):
    """One decoder layer, cut on both sides of attention."""

    scale: float

    def queries(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norm, QKV projection, q/k-norm, RoPE: [1, T, E] -> q [T, H, D], k and v [T, Hkv, D], residual [1, T, E]."""

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection, norm and MLP: attended [T, H, D] -> hidden and residual, [1, T, E] each."""


class PackedLayer(Layer, Protocol):
    """A layer whose queries one kernel makes, with the KV written on the way; for steps on fixed buffers."""

    def packed(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary, cache: KVCache, pages: Tensor,
               offsets: Tensor, kernels: Any, return_key: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """`queries` and the write to the cache: q [T, H, D], k [T, Hkv, D] or None, residual [1, T, E]."""


class Decoder(Protocol):
    """A decoder of at least two layers."""

    layers: Sequence[Layer]

    def embed(self, input_ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, E]."""

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Rotary:
        """Cosines and sines of the rows, [T, rotary size] each."""

    def norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The final norm, [1, N, E] -> [1, N, E]."""
