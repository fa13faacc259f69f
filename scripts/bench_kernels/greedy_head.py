"""Greedy head of SDAR-8B: about four masked rows a sequence stay, in buffers for one and a half times as many."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.greedy_head import greedy_head

VOCABULARY, MASK_TOKEN = 151936, 151669


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (an exponential and an addition a logit)."""
    for batch in (1, 8, 32, 128, 256):
        rows = batch * 4
        logits = torch.randn(rows * 3 // 2, VOCABULARY, dtype=torch.bfloat16, device='cuda')
        count = torch.tensor([rows], dtype=torch.int32, device='cuda')
        yield (f'greedy_head batch {batch} rows {rows}', lambda a=(logits, MASK_TOKEN, count): greedy_head(*a),
               rows * (VOCABULARY * 2 + 12), 2 * rows * VOCABULARY)
