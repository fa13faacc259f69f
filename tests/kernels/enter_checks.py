"""What must hold for the Triton enter, interpreted or compiled; run as a module it checks the small shapes."""
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_enter
from lmdeploy_focus.kernels.enter import enter
from lmdeploy_focus.kernels.layout import Rows
from torch import Tensor

from .rows_cases import (
    PAGE_SIZE,
    UNLIMITED,
    assert_same,
    assert_told,
    assert_untouched,
    cuts,
    dirty,
    make_pace,
    make_state,
)

SMALL = [(1, 4), (3, 16), (17, 32), (3, 64), (5, 7), (6, 33)]  # S, L
LARGE = [(17, 64), (600, 4), (1100, 8), (512, 16), (256, 32), (256, 64), (513, 33)]
OPTIONS: list[dict[str, Any]] = [{}, {'kv_visible': 'reference'}]


def wants(table: Tensor, page_table: Tensor, length: int) -> Tensor:
    """[S] rows that each sequence would like to enter."""
    pace = make_pace(str(table.device))
    return reference_enter.enter(table, page_table, PAGE_SIZE, pace, length).start.diff().cpu()


def check_step(table: Tensor, page_table: Tensor, length: int, options: dict[str, Any], limit: int, turn: int,
               capacity: int) -> None:
    """Every value of the twin, in the buffers of a longer step, and nothing beyond."""
    device = table.device.type
    pace, twins = (make_pace(device, (limit, -1, -1), turn) for _ in range(2))
    before = table.clone()
    out = dirty(Rows, table.size(0), length, capacity, device)
    assert enter(table, page_table, PAGE_SIZE, pace, length, **options, out=out) is out
    expected = reference_enter.enter(table, page_table, PAGE_SIZE, twins, length, **options,
                                     out=dirty(Rows, table.size(0), length, capacity, device))
    assert_same(out, expected, limit)
    assert_told(pace, twins)
    assert_untouched(out)
    assert table.equal(before)


def check_twin(shape: tuple[int, int], options: dict[str, Any], device: str, seeds: int = 2) -> None:
    """Limits of every kind, buffers with room to spare and without."""
    sequences, length = shape
    for seed in range(seeds):
        table, page_table = make_state(sequences, length, device, seed)
        wanted = wants(table, page_table, length)
        turn = 7 * seed + 3
        for limit in [*cuts(wanted, turn, seed), UNLIMITED]:
            check_step(table, page_table, length, options, limit, turn, sequences * 2 * length + 600 * seed)
        # no more room than rows, and less than rows: whoever does not find any waits
        check_step(table, page_table, length, options, UNLIMITED, turn, int(wanted.sum()))
        check_step(table, page_table, length, options, UNLIMITED, turn, int(wanted.sum()) // 2)


def check_rotation(shape: tuple[int, int], device: str) -> None:
    """Every sequence is first once, with room for about half of the rows; and a turn of a long life."""
    sequences, length = shape
    table, page_table = make_state(sequences, length, device, 5)
    limit = int(wants(table, page_table, length).sum()) // 2
    for turn in (*range(sequences), 10**12 + 1):
        check_step(table, page_table, length, {}, limit, turn, sequences * 2 * length)


def check_dead(device: str) -> None:
    """Without a sequence that is alive there is no row, and the buffers are clean."""
    table, page_table = make_state(17, 16, device)
    table[:, 32:] = torch.where(torch.arange(table.size(1) - 32, device=device) == 10, 0, table[:, 32:])
    check_step(table, page_table, 16, {}, 700, 0, 900)
    result = enter(table, page_table, PAGE_SIZE, make_pace(device), 16)
    assert result.start.eq(0).all() and result.pages.eq(-1).all() and result.candidates.eq(-1).all()


def check_refusals(device: str) -> None:
    """What the kernel cannot take, and options that do not exist, raise and say which, what and why."""
    table, page_table = make_state(3, 16, device)
    pace = make_pace(device)
    arguments = {'table': table, 'page_table': page_table, 'page_size': PAGE_SIZE, 'pace': pace, 'length': 16}
    short = Rows.empty(3, 16, 96, device)
    short.visible = short.visible[:90]
    narrow = make_pace(device)
    narrow.limits = narrow.limits[:2]
    early = make_pace(device)
    early.turn = early.turn.int()
    untold = make_pace(device)
    untold.totals = untold.totals[:2]
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({'table': table.int()}, ('table', 'torch.int32', 'torch.int64')),
        ({'table': table[:, :44]}, ('table', '(3, 44)', '45')),
        ({'table': table.T.contiguous().T}, ('table', 'strides (1, 3)', 'contiguous')),
        ({'table': table[:0], 'page_table': page_table[:0]}, ('table', '(0, 45)', 'at least 1')),
        ({'length': 65}, ('length=65', '64')), ({'length': 0}, ('length=0', '1')), ({'length': 8}, ('table', '29')),
        ({'page_table': page_table[:2]}, ('page_table', '(2, 80)', '[3, P]')),
        ({'page_table': page_table.float()}, ('page_table', 'torch.float32', 'int64')),
        ({'page_size': 0}, ('page_size=0', 'at least 1')), ({'kv_visible': 'all'}, ("kv_visible='all'", 'reference')),
        ({'pace': narrow}, ('pace.limits', '(2,)', '(3,)')), ({'pace': early}, ('pace.turn', 'int32', 'int64')),
        ({'pace': untold}, ('pace.totals', '(2, 4)', '(4, 4)')), ({'out': short}, ('out.visible', '(90,)', '(96,)')),
        ({'out': Rows.empty(3, 8, 96, device)}, ('out.candidates', '(3, 8)', '(3, 16)')),
        ({'out': Rows.empty(2, 16, 96, device)}, ('out.start', '(3,)', '(4,)'))]
    expect_refusals(enter, arguments, refused)


def expect_refusals(function: Any, arguments: dict[str, Any],
                    refused: list[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    """Each change of the arguments raises a ValueError that contains all of its words."""
    for changed, words in refused:
        try:
            function(**arguments | changed)
        except ValueError as error:
            assert all(word in str(error) for word in words), (str(error), words)
            continue
        raise AssertionError(changed)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, {}, 'cpu', seeds=2 if shape[0] < 17 else 1)
    check_twin((3, 32), {'kv_visible': 'reference'}, 'cpu')
    check_rotation((3, 16), 'cpu')
    check_rotation((6, 33), 'cpu')
    check_dead('cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
