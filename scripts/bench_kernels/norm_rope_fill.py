"""Norm, RoPE and KV write of one layer: 7 rows a sequence, as after eviction, and all 32."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.norm_rope_fill import norm_rope_fill

BATCHES = 1, 8, 32, 128, 256
HEADS, KV_HEADS, SIZE, PAGE, CONTEXT = 32, 8, 128, 64, 1024


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """(name, fn, bytes moved, operations)."""
    weights = torch.randn(2, SIZE, dtype=torch.bfloat16, device='cuda')
    for batch in BATCHES:
        pool = torch.empty(batch * CONTEXT // PAGE, 2, PAGE, KV_HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
        for rows in (7 * batch, 32 * batch):
            qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * SIZE, dtype=torch.bfloat16, device='cuda')
            tables = torch.randn(2, rows, SIZE, dtype=torch.bfloat16, device='cuda')
            slots = torch.randperm(batch * CONTEXT, device='cuda')[:rows]
            pages, offsets = slots // PAGE, slots % PAGE

            def fn(qkv=qkv, tables=tables, pool=pool, pages=pages, offsets=offsets) -> None:
                norm_rope_fill(qkv, *weights, *tables, pool[:, 0], pool[:, 1], pages, offsets, 1e-6)

            yield (f'norm_rope_fill batch {batch} {rows} rows', fn,
                   2 * qkv.numel() * 2 + tables.numel() * 2, 10 * qkv.numel())
