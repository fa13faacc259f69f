"""Unmasking, delayed cache, stops and the next block of a step of SDAR-8B: four sampled rows and two stop words."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.settle import Blocks, Settled, settle

LENGTH, SAMPLED = 32, 4


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (none to speak of)."""
    for batch in (1, 8, 32, 128, 256):
        def full(value: float, batch: int = batch, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((batch,), value, dtype=dtype, device='cuda')

        blocks = Blocks(ids=torch.randint(0, 9999, (batch, LENGTH), device='cuda'), masked=full((1 << 26) - 4),
                        cached=full(0), uncached=full((1 << 26) - 1), progress=full(3), decoded=full(4), steps=full(2),
                        history=full(1024), appendable=full(999), random_offsets=full(7))
        out = Settled.empty(batch, LENGTH, 'cuda')
        arguments = (blocks, full((1 << 26) - 1), full(0b111111), torch.arange(batch + 1, device='cuda') * SAMPLED,
                     full(5), torch.randint(0, 9999, (batch * SAMPLED,), device='cuda'),
                     torch.rand(batch * SAMPLED, device='cuda'), full(.8, dtype=torch.float32), full(900),
                     torch.full((batch, 2), 151643, device='cuda'), 151669)
        moved = batch * (LENGTH * (8 * 3 + 1) + 2 * 9 * 8 + 9 * 8 + SAMPLED * 12)
        yield f'settle batch {batch}', lambda a=arguments, o=out: settle(*a, out=o), moved, 0
