"""Attention of verification and drafting on a GPU: LMDeploy's operator, with our kernel for decode steps.

LMDeploy's own takes several rows a sequence in a decode step with FlashAttention-3 alone, which needs compute
capability 8.0, CUDA 12.3 and a package of its own; ours runs wherever Triton does. Prefill stays LMDeploy's.
"""
from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.cuda import attention as stock
from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl, TritonAttentionMetaBuilder
from torch import Tensor

from ..kernels.dispatch import kernels_for
from .rows import DecodeRows

_HEAD_SIZES = (16, 32, 64, 128)


class DecodeRowsAttentionImpl(TritonAttentionImpl):
    """LMDeploy's Triton operator for any number of rows a sequence in a decode step, causal or not, with a window."""

    def get_step_metadata_provider(self) -> TritonAttentionMetaBuilder:
        """Nothing beyond LMDeploy's sequence layout: what else is needed follows from it on the device."""
        return TritonAttentionMetaBuilder()

    def _get_max_q_seqlen(self, query: Tensor, attn_metadata: Any) -> int:
        if attn_metadata.is_decoding:
            return query.size(0) // attn_metadata.kv_seqlens.size(0)
        return super()._get_max_q_seqlen(query, attn_metadata)

    def _forward_decoding(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, attn_metadata: Any, max_q_seqlen: int,
                          k_scales_zeros: Tensor | None = None, v_scales_zeros: Tensor | None = None,
                          learnable_sink: Tensor | None = None) -> Tensor:
        """[T, H, D] of the queries [T, H, D], max_q_seqlen a sequence.

        Raises:
            ValueError: the cache is quantised, or the layer has attention sinks.
        """
        if k_scales_zeros is not None or v_scales_zeros is not None or learnable_sink is not None:
            raise ValueError('DFlash attends to plain keys and values; the cache is quantised or the layer has a sink')
        kernels = kernels_for(query.device.type)
        rows = self._rows(query, attn_metadata, max_q_seqlen, kernels)
        return kernels.ragged_attention(query, k_cache, v_cache, attn_metadata.block_offsets, rows.start, rows.visible,
                                        rows.work, attn_metadata.block_offsets.size(1) * k_cache.size(1), self.scale,
                                        hidden=rows.hidden)

    def _rows(self, query: Tensor, attn_metadata: Any, max_q_seqlen: int, kernels: Any) -> DecodeRows:
        """The rows of the step, made by its first layer of a kind.

        A capture makes its own: those of the pass before it would be constants in the graph.
        """
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        window = self.sliding_window[0] if self.sliding_window[0] > 0 else None
        group = self.num_heads // self.num_kv_heads
        made = attn_metadata.__dict__.setdefault('decode_rows', {})
        key = (capturing, self.causal, window, group, query.dtype)
        if key not in made:
            made[key] = DecodeRows.of(attn_metadata.kv_seqlens, max_q_seqlen, self.causal, window, group, query.dtype,
                                      kernels)
        return made[key]


def build_attention(spec: PagedAttentionBuildSpec,
                    build_stock: Callable[[PagedAttentionBuildSpec], TritonAttentionImpl]) -> TritonAttentionImpl:
    """The operator of one layer of target or drafter: FlashAttention-3's where it is installed and the layer has no
    window, which that applies to both sides; else ours.

    Raises:
        ValueError: the layer has what our kernel does not; the message names it.
    """
    window = spec.sliding_window[0] if isinstance(spec.sliding_window, tuple) else spec.sliding_window
    windowed = window is not None and window > 0
    if stock.use_fa3 and not windowed:
        return build_stock(spec)
    refused = {'logit_softcapping': spec.logit_softcapping, 'alibi': spec.alibi, 'learnable_sink': spec.learnable_sink,
               'use_flash_mla': spec.use_flash_mla}
    for name, value in refused.items():
        if value:
            raise ValueError(f'{name} of a layer is {value!r}; with DFlash it must be off')
    if spec.head_dim not in _HEAD_SIZES:
        raise ValueError(f'head_dim of a layer is {spec.head_dim}; with DFlash it must be one of {_HEAD_SIZES}')
    return DecodeRowsAttentionImpl(num_heads=spec.num_heads, head_size=spec.head_dim, scale=spec.scale,
                                   num_kv_heads=spec.num_kv_heads, v_head_size=spec.v_head_dim,
                                   sliding_window=(window, window) if windowed else (-1, -1), causal=spec.causal)
