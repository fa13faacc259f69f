"""Importance of one layer of SDAR-8B: 24 of 32 tokens of each block masked."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.importance import importance, importance_partial

LENGTH, MASKED, HEADS, KV_HEADS, SIZE = 32, 24, 32, 8, 128


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations."""
    for batch in (1, 8, 32, 128, 256):
        query, key = (torch.randn(batch * LENGTH, heads, SIZE, dtype=torch.bfloat16, device='cuda')
                      for heads in (HEADS, KV_HEADS))
        place = torch.arange(LENGTH, device='cuda')
        candidates = torch.where(place < MASKED, torch.arange(batch, device='cuda')[:, None] * LENGTH + place, -1)
        out = torch.empty(batch, KV_HEADS, LENGTH, device='cuda')
        arguments = (query, key, candidates, SIZE**-0.5)
        moved = batch * (MASKED * (HEADS + KV_HEADS) * SIZE * 2 + LENGTH * 8)
        operations = 2 * batch * HEADS * MASKED * MASKED * SIZE
        yield (f'importance_partial batch {batch}', lambda a=arguments, o=out: importance_partial(*a, o),
               moved + batch * KV_HEADS * LENGTH * 4, operations)
        yield f'importance batch {batch}', lambda a=arguments: importance(*a), moved + batch * LENGTH * 4, operations
