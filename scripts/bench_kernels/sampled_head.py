"""Sampled head of SDAR-8B at the rows of the greedy head's cases; all of them sampled."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.sampled_head import sampled_head

VOCABULARY, MASK_TOKEN, LENGTH = 151936, 151669, 4


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (an exponential and an addition a logit)."""
    for batch in (1, 8, 32, 128, 150, 256):
        rows = batch * 4
        capacity = rows * 3 // 2
        logits = torch.randn(capacity, VOCABULARY, dtype=torch.bfloat16, device='cuda')
        count = torch.tensor([rows], dtype=torch.int32, device='cuda')
        index = torch.arange(capacity, device='cuda')
        own = {name: torch.full((capacity,), value, device='cuda')
               for name, value in (('temperature', .8), ('top_k', 40), ('top_p', .95), ('min_p', .02), ('seeds', 7))}
        arguments = own | {'sequence': index // 4, 'position': index % 4, 'random_offset': index, 'length': LENGTH}
        yield (f'sampled_head batch {batch} rows {rows}',
               lambda a=(logits, MASK_TOKEN, count), k=arguments: sampled_head(*a, **k),
               rows * (VOCABULARY * 2 + 12), 2 * rows * VOCABULARY)
