"""Budget, selection and compaction of a step of SDAR-8B, in a table of 256 sequences: 26 rows of each block enter, 24
of them masked, and of a third of them the block before."""
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from lmdeploy_focus.kernels.enter import enter
from lmdeploy_focus.kernels.layout import Pace, Plan
from lmdeploy_focus.kernels.plan import plan

LENGTH, KV_HEADS, PAGE, SEQUENCES = 32, 8, 64, 256


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (comparisons of the ranking)."""
    make_table = runpy.run_path(str(Path(__file__).with_name('enter.py')))['make_table']
    pages = torch.randint(0, 9999, (SEQUENCES, 32), device='cuda')
    first, second = torch.rand(2, SEQUENCES, KV_HEADS, LENGTH, device='cuda')
    out = Plan.empty(SEQUENCES, LENGTH, SEQUENCES * 2 * LENGTH, 'cuda')
    for alive in (0, 1, 8, 32, 128, 256):
        table, pace = make_table(alive), Pace.unlimited('cuda')
        entered = enter(table, pages, PAGE, pace, LENGTH)
        plan(first, second, table, entered, pace, LENGTH, out=out)
        rows, sampled = int(out.start[-1]), int(out.sampled_start[-1])
        pace.limits.copy_(torch.tensor([-(-number // 64) * 64 for number in (rows, rows, sampled)]))
        moved = alive * 2 * KV_HEADS * LENGTH * 4 + rows * 12 * 8 + sampled * 3 * 8 + SEQUENCES * (LENGTH + 8) * 8
        arguments = {'first': first, 'second': second, 'table': table, 'entered': entered, 'pace': pace,
                     'length': LENGTH, 'out': out}
        yield f'plan {alive} of {SEQUENCES}', lambda a=arguments: plan(**a), moved, alive * 2 * LENGTH * LENGTH
