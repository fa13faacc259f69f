"""Rows that enter a step of SDAR-8B, in a table of 256 sequences: 26 of each block, and of a third of them the block
before."""
from collections.abc import Callable, Iterator

import torch
from lmdeploy_focus.kernels.enter import enter
from lmdeploy_focus.kernels.layout import Pace, Rows, state_columns, state_width

LENGTH, PAGE, SEQUENCES = 32, 64, 256


def make_table(alive: int) -> torch.Tensor:
    """States of which so many are alive."""
    table = torch.zeros(SEQUENCES, state_width(LENGTH), dtype=torch.int64, device='cuda')
    state = state_columns(table, LENGTH)
    values = {'masked': (1 << 26) - 4, 'uncached': (1 << 26) - 1, 'progress': 3, 'decoded': 4, 'steps': 2,
              'history': 1024, 'alpha': 1.5}
    for name, value in values.items():
        getattr(state, name).fill_(value)
    state.alive[:alive] = 1
    state.pending[:alive:3] = (1 << 32) - 1
    return table


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Name, call, bytes that must move, floating-point operations (none)."""
    pages = torch.randint(0, 9999, (SEQUENCES, 32), device='cuda')
    out = Rows.empty(SEQUENCES, LENGTH, SEQUENCES * 2 * LENGTH, 'cuda')
    for alive in (0, 1, 8, 32, 128, 256):
        table, pace = make_table(alive), Pace.unlimited('cuda')
        rows = alive * 26 + -(-alive // 3) * LENGTH
        pace.limits.fill_(-(-rows // 64) * 64)  # as the host's bucket does
        moved = rows * 9 * 8 + SEQUENCES * (LENGTH + 8) * 8
        arguments = {'table': table, 'page_table': pages, 'page_size': PAGE, 'pace': pace, 'length': LENGTH, 'out': out}
        yield f'enter {alive} of {SEQUENCES}', lambda a=arguments: enter(**a), moved, 0
