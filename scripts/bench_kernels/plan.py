"""Budget, selection and compaction metadata of a step of SDAR-8B: 26 rows of each block enter, 24 of them masked."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.plan import Plan, plan

LENGTH, KV_HEADS, PAGE = 32, 8, 64


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (comparisons of the ranking)."""
    for batch in (1, 8, 32, 128, 256):
        def full(value: float, batch: int = batch, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((batch,), value, dtype=dtype, device='cuda')

        first, second = torch.rand(2, batch, KV_HEADS, LENGTH, device='cuda')
        out = Plan.empty(batch, LENGTH, 'cuda')
        out.total = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        table = torch.randint(0, 9999, (batch, 32), device='cuda')
        arguments = {
            'first': first, 'second': second, 'entering': full((1 << 26) - 1), 'masked': full((1 << 26) - 4),
            'q_start': torch.arange(batch + 1, device='cuda') * 26, 'history': full(1024), 'page_table': table,
            'page_size': PAGE, 'progress': full(3), 'decoded': full(4), 'steps': full(2),
            'alpha': full(1.5, dtype=torch.float64), 'out': out}
        moved = batch * (2 * KV_HEADS * LENGTH * 4 + LENGTH * (8 * 7 + 1) + 14 * 8)
        yield f'plan batch {batch}', lambda a=arguments: plan(**a), moved, batch * 2 * LENGTH * LENGTH
