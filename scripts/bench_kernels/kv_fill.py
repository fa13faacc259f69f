"""KV write of one layer: 7 rows a sequence, as after eviction, and all 32."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.kv_fill import kv_fill

BATCHES = 1, 8, 32, 128, 256
KV_HEADS, SIZE, PAGE, CONTEXT = 8, 128, 64, 1024


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """(name, fn, bytes moved, operations)."""
    for batch in BATCHES:
        pool = torch.empty(batch * CONTEXT // PAGE, 2, PAGE, KV_HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
        for rows in (7 * batch, 32 * batch):
            key, value = torch.randn(2, rows, KV_HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
            slots = torch.randperm(batch * CONTEXT, device='cuda')[:rows]
            pages, offsets = slots // PAGE, slots % PAGE

            def fn(key=key, value=value, pool=pool, pages=pages, offsets=offsets) -> None:
                kv_fill(key, value, pool[:, 0], pool[:, 1], pages, offsets)

            yield f'kv_fill batch {batch} {rows} rows', fn, 2 * 2 * rows * KV_HEADS * SIZE * 2, 0
