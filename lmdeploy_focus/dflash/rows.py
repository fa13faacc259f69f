"""What the rows of a step see and where their keys go, as our kernels take it.

Verification and drafting have R rows a sequence: 1 + k of the target, and a block of the drafter. LMDeploy's metadata
says how long the texts are; which of the keys a row sees follows from the layer's `causal` and its window.

Letters: S sequences, R rows of each, T = S * R, P pages a sequence.
"""
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step, for all layers that see alike.

    Attributes:
        start: [S + 1] int64, first row of each sequence.
        visible: [T], how many of the first keys a row sees.
        hidden: [T], how many of those its window hides, or None without a window.
        work: of the attention kernel.
    """
    start: Tensor
    visible: Tensor
    hidden: Tensor | None
    work: Any

    @classmethod
    def of(cls, kv_seqlens: Tensor, rows: int, causal: bool, window: int | None, group: int, dtype: torch.dtype,
           kernels: Any) -> 'DecodeRows':
        """From the lengths of the texts, the rows' own tokens included.

        Args:
            kv_seqlens: [S] integer.
            rows: R.
            causal: whether a row sees none of the later ones.
            window: how many keys a row sees, its own the last of them; None for all.
            group: query heads of a key head.
            dtype: of the queries.
            kernels: of `kernels_for`.
        """
        sequences = kv_seqlens.size(0)
        start = torch.arange(sequences + 1, device=kv_seqlens.device) * rows
        place = torch.arange(1, rows + 1, device=kv_seqlens.device)
        own = ((kv_seqlens - rows)[:, None] + place).flatten()
        visible = own if causal else kv_seqlens.repeat_interleave(rows, output_size=sequences * rows)
        hidden = None if window is None else (own - window).clamp_min(0)
        work = kernels.attention_work(start, group, sequences * rows, dtype)
        return cls(start, visible, hidden, work)


def write_slots(attn_metadata: Any, position_ids: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and slot within it of each row, both [T], without asking the device for a number.

    Args:
        attn_metadata: of the step: `block_offsets` [S, P] and `q_seqlens` [S].
        position_ids: [T], the rows' positions in their texts.
        page_size: tokens a page.
    """
    table = attn_metadata.block_offsets
    sequence = torch.arange(table.size(0), device=table.device)
    sequence = sequence.repeat_interleave(attn_metadata.q_seqlens, output_size=position_ids.size(0))
    return table[sequence, position_ids // page_size], position_ids % page_size


def stacked(caches: list[Tensor]) -> Tensor:
    """The caches of all layers, views of one buffer at equal distances, as one tensor [L, ...] that shares it.

    Raises:
        ValueError: they are not.
    """
    first = caches[0]
    step = caches[1].storage_offset() - first.storage_offset() if len(caches) > 1 else 0
    for layer, cache in enumerate(caches):
        alike = cache.shape == first.shape and cache.stride() == first.stride() and cache.dtype == first.dtype
        offset = first.storage_offset() + layer * step
        if not alike or cache.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or \
                cache.storage_offset() != offset:
            raise ValueError(f'cache {layer} of {len(caches)}, {tuple(cache.shape)} with strides {cache.stride()}, is '
                             "no view of the first one's buffer at an equal distance from the one before")
    return first.as_strided((len(caches), *first.shape), (step, *first.stride()))
