"""Paged attention on a CPU.

Letters: S sequences, Q query rows of one of them, T query rows of all, K keys, H query heads, Hkv key heads, D head
size. A query row sees a prefix of its sequence's keys, and `visible` holds the length of that prefix: the position
plus one for a causal model, the end of the row's block for block diffusion, every key where nothing is hidden. A
sliding window hides the first `hidden` keys of that prefix. Two numbers a row say it all, so masks exist only inside
`attend`.

Softmax and sums are fp32 whatever the dtype of the cache; the result has the query's dtype.
"""
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.attention import AttentionImpl, AttentionMetadata, PagedAttentionBuildSpec

# Bounds the mask and the scores of one call; a long prompt is attended in chunks of query rows.
MAX_SCORES = 1 << 24


def gather_pages(cache: torch.Tensor, block_offsets_row: torch.Tensor, length: int) -> torch.Tensor:
    """Collect the first `length` entries of one sequence.

    Args:
        cache: Keys or values of one layer, [pages, page size, Hkv, D].
        block_offsets_row: The sequence's pages in order, [at least ceil(length / page size)], integer.
        length: Number of entries.

    Returns:
        A copy, [length, Hkv, D], in the cache's dtype.
    """
    page_size = cache.size(1)
    num_pages = (length + page_size - 1) // page_size
    return cache.index_select(0, block_offsets_row[:num_pages]).flatten(0, 1)[:length]


def slots_of(block_offsets: torch.Tensor, positions: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where positions lie in the cache.

    Args:
        block_offsets: Pages of each sequence, [S, pages a sequence], integer.
        positions: Positions in each sequence, [S, n], int64.
        page_size: Entries a page.

    Returns:
        Page and offset in the page, both [S, n].
    """
    return block_offsets.gather(1, positions // page_size), positions % page_size


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None,
           scale: float, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax attention of sequences that have equally many query rows.

    Args:
        query: [S, Q, H, D].
        key: [S, K, Hkv, D]; H is a multiple of Hkv.
        value: [S, K, Hkv, Dv].
        visible: How many leading keys a row sees, [S, Q] or [S, 1], int64, from 1 to K; None if each row sees all.
        scale: Factor on the scores.
        hidden: How many leading keys a row does not see, of the shape of `visible` and less than it; None for 0.

    Returns:
        [S, Q, H, Dv] in the query's dtype.
    """
    num_seqs, num_rows, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    # The heads that share a key head become further rows of it: keys and values are never repeated.
    rows = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(num_seqs, num_kv_heads, group * num_rows, head_dim).float()
    mask = None
    if visible is not None:
        mask = torch.arange(num_keys) < visible[:, :, None]
        if hidden is not None:
            mask &= torch.arange(num_keys) >= hidden[:, :, None]
        if mask.size(1) > 1:
            mask = mask.repeat(1, group, 1)
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(rows,
                                         key.transpose(1, 2).float(),
                                         value.transpose(1, 2).float(),
                                         attn_mask=mask,
                                         scale=scale)
    out = out.unflatten(2, (group, num_rows)).permute(0, 3, 1, 2, 4)
    return out.reshape(num_seqs, num_rows, num_heads, -1).to(query.dtype)


@dataclass(kw_only=True)
class CpuAttentionMetadata(AttentionMetadata):
    """What all layers of one step share.

    Attributes:
        q_lens: Query rows of each sequence, [S].
        kv_lens: Keys of each sequence, those of this step included, [S].
        positions: Position of each query row in its sequence, [T], int64.
        write_pages, write_offsets: Where each row's key and value go, [T], int64.
        read_pages, read_offsets: Where the keys of each sequence lie, [S, max(kv_lens)], int64, if all `q_lens` are
            equal. A padded entry repeats the sequence's last key, so what other sequences left in a page is never read.
    """
    q_lens: list[int]
    kv_lens: list[int]
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    read_pages: torch.Tensor | None = None
    read_offsets: torch.Tensor | None = None

    @classmethod
    def from_step_context(cls, context: Any) -> 'CpuAttentionMetadata':
        """Build it from the sequence lengths and page tables of a `StepContext`."""
        q_seqlens, kv_seqlens = context.q_seqlens, context.kv_seqlens
        block_offsets = context.block_offsets.long()
        page_size = context.cache_config.kernel_block_size
        q_lens, kv_lens = q_seqlens.tolist(), kv_seqlens.tolist()

        cu_seqlens_q = F.pad(q_seqlens.cumsum(0), (1, 0))
        sequence = torch.arange(len(q_lens)).repeat_interleave(q_seqlens)
        positions = torch.arange(sum(q_lens)) + (kv_seqlens - q_seqlens - cu_seqlens_q[:-1])[sequence]
        read_pages = read_offsets = None
        if len(set(q_lens)) == 1:
            keys = torch.minimum(torch.arange(max(kv_lens)), kv_seqlens[:, None] - 1)
            read_pages, read_offsets = slots_of(block_offsets, keys, page_size)
        return cls(is_decoding=context.is_decoding,
                   block_offsets=block_offsets,
                   q_start_loc=context.q_start_loc,
                   q_seqlens=q_seqlens,
                   kv_seqlens=kv_seqlens,
                   cu_seqlens_q=cu_seqlens_q.int(),
                   cu_seqlens_k=F.pad(kv_seqlens.cumsum(0, dtype=torch.int32), (1, 0)),
                   quant_policy=context.kv_quant_policy,
                   q_lens=q_lens,
                   kv_lens=kv_lens,
                   positions=positions,
                   write_pages=block_offsets[sequence, positions // page_size],
                   write_offsets=positions % page_size,
                   read_pages=read_pages,
                   read_offsets=read_offsets)


class CpuAttentionImpl(AttentionImpl[CpuAttentionMetadata]):
    """Writes this step's keys and values to the cache and attends over the pages.

    Raises:
        ValueError: The model needs a kind of attention that there is no CPU code for.
    """

    def __init__(self, spec: PagedAttentionBuildSpec) -> None:
        unsupported = {
            'logit_softcapping': spec.logit_softcapping,
            'alibi': spec.alibi,
            'use_flash_mla': spec.use_flash_mla,
            'mla_index_topk': spec.mla_index_topk,
            'learnable_sink': spec.learnable_sink,
        }
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"device_type='cpu' has no attention with {name}: the model asks for {name}={value}")
        super().__init__(num_heads=spec.num_heads,
                         head_size=spec.head_dim,
                         scale=spec.scale,
                         num_kv_heads=spec.num_kv_heads,
                         v_head_size=spec.v_head_dim,
                         causal=spec.causal)
        self.block_sparse_size = spec.block_sparse_size
        window = spec.sliding_window[0] if isinstance(spec.sliding_window, tuple) else spec.sliding_window
        self.window = window if window is not None and window > 0 else None

    def hidden(self, positions: torch.Tensor) -> torch.Tensor | None:
        """How many leading keys each row does not see, of the shape of `positions`; None without a window.

        A window of w keys ends at the row's own, as in transformers.
        """
        return None if self.window is None else (positions + 1 - self.window).clamp_min(0)

    def visible(self, positions: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        """How many leading keys each row sees: [T] from positions [T] and its sequence's number of keys, [T] or 1."""
        if self.block_sparse_size > 1:
            size = self.block_sparse_size
            return torch.minimum((positions // size + 1) * size, kv_lens)
        if self.causal:
            return positions + 1
        return kv_lens.expand_as(positions)

    def forward(self,
                query: torch.Tensor,
                key: torch.Tensor | None,
                value: torch.Tensor | None,
                k_cache: torch.Tensor,
                v_cache: torch.Tensor,
                attn_metadata: CpuAttentionMetadata,
                k_scales_zeros: torch.Tensor | None = None,
                v_scales_zeros: torch.Tensor | None = None,
                learnable_sink: torch.Tensor | None = None,
                nsa_indices: torch.Tensor | None = None,
                inplace: bool = False) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: [T, H, D], the rows of the sequences one after another.
            key, value: [T, Hkv, D] of the same rows; None where the layer reads the cache of another.
            k_cache, v_cache: [pages, page size, Hkv, D].
            attn_metadata: The step.
            k_scales_zeros, v_scales_zeros, learnable_sink, nsa_indices, inplace: Part of the interface; a layer that
                needs one of the first four is refused when it is built.

        Returns:
            [T, H, Dv] in the query's dtype.
        """
        meta = attn_metadata
        if key is not None and value is not None:
            k_cache[meta.write_pages, meta.write_offsets] = key.to(k_cache.dtype)
            v_cache[meta.write_pages, meta.write_offsets] = value.to(v_cache.dtype)
        if meta.read_pages is not None and self._scores(query.size(0), max(meta.kv_lens)) <= MAX_SCORES:
            return self._forward_batch(query, k_cache, v_cache, meta)
        return self._forward_each(query, k_cache, v_cache, meta)

    def _scores(self, num_rows: int, num_keys: int) -> int:
        return num_rows * self.num_heads * num_keys

    def _forward_batch(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                       meta: CpuAttentionMetadata) -> torch.Tensor:
        """All sequences at once: each has the same number of query rows, as in decoding."""
        num_rows = meta.q_lens[0]
        positions = meta.positions.view(-1, num_rows)
        visible, hidden = self.visible(positions, meta.kv_seqlens[:, None]), self.hidden(positions)
        if hidden is None and bool((visible == visible[:, :1]).all()):
            visible = visible[:, :1]
        out = attend(query.unflatten(0, (-1, num_rows)), k_cache[meta.read_pages, meta.read_offsets],
                     v_cache[meta.read_pages, meta.read_offsets], visible, self.scale, hidden)
        return out.flatten(0, 1)

    def _forward_each(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                      meta: CpuAttentionMetadata) -> torch.Tensor:
        """One sequence after another: a prefill of unequal prompts wastes no work on padding."""
        out = query.new_empty(query.size(0), self.num_heads, self.v_head_size)
        start = 0
        for pages, num_rows, num_keys in zip(meta.block_offsets, meta.q_lens, meta.kv_lens, strict=True):
            key = gather_pages(k_cache, pages, num_keys)[None].float()
            value = gather_pages(v_cache, pages, num_keys)[None].float()
            positions = meta.positions[start:start + num_rows]
            visible, hidden = self.visible(positions, torch.tensor([num_keys])), self.hidden(positions)
            chunk = max(1, MAX_SCORES // self._scores(1, num_keys))
            for first in range(0, num_rows, chunk):
                rows = slice(first, min(first + chunk, num_rows))
                seen = visible[rows]
                # No later key is seen by this chunk.
                longest = int(seen.max())
                part = attend(query[start:start + num_rows][rows][None], key[:, :longest], value[:, :longest],
                              seen[None], self.scale, None if hidden is None else hidden[rows][None])
                out[start + rows.start:start + rows.stop] = part[0]
            start += num_rows
        return out
