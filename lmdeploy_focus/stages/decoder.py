"""What the stages ask of a model: a decoder split between the queries of a layer and the rest of it."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

KVCache = tuple[Tensor, Tensor]
Rotary = tuple[Tensor, Tensor]


class Layer(Protocol):
    """One decoder layer, cut on both sides of attention.

    Attributes:
        scale: factor of the attention scores.
    """

    scale: float

    def queries(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary, cache: KVCache, pages: Tensor,
                offsets: Tensor, kernels: Any, return_key: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Norm, QKV projection, q/k-norm, RoPE, and the write to the cache: hidden [1, T, E] -> q [T, H, D],
        k [T, Hkv, D] or None, residual [1, T, E]."""

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection, norm and MLP: attended [T, H, D] -> hidden and residual, [1, T, E] each."""


class Decoder(Protocol):
    """A decoder of at least two layers."""

    layers: Sequence[Layer]

    def embed(self, input_ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, E]."""

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Rotary:
        """Cosines and sines of the rows, [T, rotary size] each."""

    def norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The final norm, [1, N, E] -> [1, N, E]."""


@dataclass
class Model:
    """What a step computes with.

    Attributes:
        decoder: the layers.
        head: hidden states [R, E] -> logits [R, V].
        caches: KV of each layer, [B, G, Hkv, D] each.
        kernels: of :func:`lmdeploy_focus.kernels.dispatch.kernels_for`.
        gather: with tensor parallelism, this rank's key heads [S, Hkv / ranks, L] -> those of all ranks in head order.
    """
    decoder: Decoder
    head: Callable[[Tensor], Tensor]
    caches: list[KVCache]
    kernels: Any
    gather: Callable[[Tensor], Tensor] | None = None
