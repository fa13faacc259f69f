"""Unmasking, delayed cache, stops and the next block of a step of SDAR-8B: four sampled rows and two stop words."""
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from lmdeploy_focus.kernels.layout import Pace, Plan, Rows, report_width, state_columns, state_width
from lmdeploy_focus.kernels.settle import settle

LENGTH, SAMPLED = 32, 4


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (none to speak of).

    The sampled positions are decided after a few calls and no block is ever complete: all later calls do the same.
    """
    for batch, running in ((1, 1), (8, 8), (32, 32), (128, 128), (256, 256), (256, 1)):
        def full(value: int, batch: int = batch, running: int = running) -> torch.Tensor:
            values = torch.zeros(batch, dtype=torch.int64, device='cuda')
            values[:running] = value
            return values

        table = torch.zeros(batch, state_width(LENGTH), dtype=torch.int64, device='cuda')
        state = state_columns(table, LENGTH)
        state.ids.copy_(torch.randint(0, 9999, (batch, LENGTH), device='cuda'))
        for name, value in {'masked': (1 << 26) - 4, 'uncached': (1 << 26) - 1, 'progress': 3, 'decoded': 4, 'steps': 2,
                            'history': 1024, 'appendable': 10**9, 'output_start': 900, 'threshold': 2}.items():
            getattr(state, name).fill_(value)
        state.alive.copy_(full(1))
        start = torch.arange(batch + 1, device='cuda').clamp_max(running) * SAMPLED
        entered = replace(Rows.empty(batch, LENGTH, 1, 'cuda'), current=full((1 << 26) - 1))
        plan = replace(Plan.empty(batch, LENGTH, 1, 'cuda'), current=full(0b111111), rightmost=full(5),
                       sampled_start=start)
        report = torch.zeros(batch, report_width(LENGTH), dtype=torch.int64, device='cuda')
        arguments = (table, entered, plan, Pace.unlimited('cuda'),
                     torch.randint(0, 9999, (running * SAMPLED,), device='cuda'),
                     torch.rand(running * SAMPLED, device='cuda'), torch.full((batch, 2), 151643, device='cuda'),
                     151669, LENGTH)
        moved = running * 8 * (LENGTH * 2 + 2 * 12) + batch * 8 * (LENGTH * 2 + 8 + 8) + running * SAMPLED * 12
        yield f'settle batch {batch}, {running} running', lambda a=arguments, r=report: settle(*a, report=r), moved, 0
