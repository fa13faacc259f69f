"""Rows that enter a step of SDAR-8B: 26 of each block."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.enter import Entered, enter

LENGTH, PAGE = 32, 64


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (none)."""
    for batch in (1, 8, 32, 128, 256):
        def full(value: int, batch: int = batch) -> torch.Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device='cuda')

        ids = torch.randint(0, 9999, (batch, LENGTH), device='cuda')
        table = torch.randint(0, 9999, (batch, 32), device='cuda')
        arguments = {
            'ids': ids, 'masked': full((1 << 26) - 4), 'cached': full(0), 'uncached': full((1 << 26) - 1),
            'history': full(1024), 'progress': full(3), 'page_table': table, 'page_size': PAGE,
            'count': torch.tensor([batch], dtype=torch.int32, device='cuda'),
            'out': Entered.empty(batch, LENGTH, 'cuda')}
        moved = batch * (LENGTH * (8 * 10 + 1) + 10 * 8)
        yield f'enter batch {batch}', lambda a=arguments: enter(**a), moved, 0
