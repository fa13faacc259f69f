"""What must hold for the Triton plan, interpreted or compiled; run as a module it checks the small shapes."""
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_enter, reference_plan
from lmdeploy_focus.kernels.layout import Plan, Rows, state_columns
from lmdeploy_focus.kernels.plan import plan
from torch import Tensor

from .enter_checks import expect_refusals
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

SMALL = [(1, 4, 1), (3, 16, 2), (17, 32, 3), (3, 64, 8), (5, 7, 1), (6, 33, 2)]  # S, L, key heads
LARGE = [(17, 64, 8), (600, 4, 1), (1100, 8, 2), (512, 16, 8), (256, 32, 8), (256, 64, 4), (1, 64, 8), (513, 33, 5)]
OPTIONS: list[dict[str, Any]] = [
    {}, {'kv_visible': 'reference'}, {'sequential': 2}, {'keep': 1}, {'keep': 64}, {'keep': 3, 'sequential': 4},
    {'selection': 'bottom'}, {'selection': 'random'}, {'selection': 'random', 'keep': 2, 'kv_visible': 'reference'}]


def make_partials(shape: tuple[int, int, int], device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Importance in layers 0 and 1, [S, Hkv, L] each: deltas wide apart, equal, and of two values (a threshold met
    exactly, ties in the ranking)."""
    sequences, length, kv_heads = shape
    random = torch.Generator().manual_seed(seed + sum(shape))
    kind = torch.randint(0, 3, (sequences, 1, 1), generator=random)
    partials = []
    for _ in range(2):
        wide = torch.randn(sequences, kv_heads, length, generator=random) * 4
        two = torch.randint(0, 2, wide.shape, generator=random) * (torch.arange(kv_heads) == 0)[:, None] / 8
        partials.append(torch.where(kind == 0, wide, torch.where(kind == 1, two, 0.5)))
    return torch.where(kind == 0, partials[0], 0.25).to(device), partials[1].to(device)


def make(shape: tuple[int, int, int], device: str, seed: int = 0, limit: int = UNLIMITED,
         turn: int = 0) -> dict[str, Any]:
    """Arguments of a plan but for its pace, behind an enter with this limit."""
    sequences, length, _ = shape
    table, page_table = make_state(sequences, length, device, seed)
    entered = reference_enter.enter(table, page_table, PAGE_SIZE, make_pace(device, (limit, 0, 0), turn), length,
                                    out=dirty(Rows, sequences, length, sequences * 2 * length, device))
    first, second = make_partials(shape, device, seed)
    return {'first': first, 'second': second, 'table': table, 'entered': entered, 'length': length}


def wants(arguments: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[S] rows that each sequence would like to keep, and to sample."""
    result = reference_plan.plan(**arguments, **options, pace=make_pace(str(arguments['table'].device)))
    return result.start.diff().cpu(), result.sampled_start.diff().cpu()


def check_step(arguments: dict[str, Any], options: dict[str, Any], limits: tuple[int, int], turn: int,
               capacity: int) -> Plan:
    """Every value of the twin, in the buffers of a longer step, and nothing beyond."""
    table, length = arguments['table'], arguments['length']
    device = table.device.type
    pace, twins = (make_pace(device, (-1, *limits), turn) for _ in range(2))
    before = table.clone()
    out = dirty(Plan, table.size(0), length, capacity, device)
    assert plan(**arguments, **options, pace=pace, out=out) is out
    expected = reference_plan.plan(**arguments, **options, pace=twins,
                                   out=dirty(Plan, table.size(0), length, capacity, device))
    assert_same(out, expected, *limits)
    assert_told(pace, twins)
    assert_untouched(out)
    assert table.equal(before)
    return out


def check_twin(shape: tuple[int, int, int], options: dict[str, Any], device: str, seeds: int = 2) -> None:
    """Limits of every kind, behind an enter that let all in and one that did not, with room to spare and without."""
    sequences, length, _ = shape
    for seed in range(seeds):
        turn = 7 * seed + 3
        arguments = make(shape, device, seed, turn=turn)
        rows, sampled = wants(arguments, options)
        roomy = sequences * 2 * length + 600 * seed
        check_step(arguments, options, (UNLIMITED, UNLIMITED), turn, roomy)
        check_step(arguments, options, (UNLIMITED, UNLIMITED), turn, int(rows.sum()) // 2)
        for limit, sampled_limit in zip(cuts(rows, turn, seed), cuts(sampled, turn, seed), strict=True):
            check_step(arguments, options, (limit, UNLIMITED), turn, roomy)
            check_step(arguments, options, (roomy, sampled_limit), turn, roomy)
            check_step(arguments, options, (limit, sampled_limit), turn, roomy)
        late = make(shape, device, seed, int(arguments['entered'].start[-1]) // 2, turn)
        check_step(late, options, (UNLIMITED, UNLIMITED), turn, roomy)
        check_step(late, options, (int(wants(late, options)[0].sum()) // 2, UNLIMITED), turn, roomy)


def check_rotation(shape: tuple[int, int, int], device: str) -> None:
    """Every sequence is first once, with room for about half of the rows or samples; and a turn of a long life."""
    sequences, length, _ = shape
    arguments = make(shape, device, 5)
    rows, sampled = (int(wanted.sum()) // 2 for wanted in wants(arguments, {}))
    for turn in (*range(sequences), 10**12 + 1):
        limits = (rows, UNLIMITED) if turn % 2 else (sequences * 2 * length, sampled)
        check_step(arguments, {}, limits, turn, sequences * 2 * length)


def check_company(device: str) -> None:
    """A sequence keeps the same positions whoever waits beside it."""
    arguments = make((7, 16, 2), device, 1)
    whole = plan(**arguments, pace=make_pace(device))
    ran = torch.zeros(7, dtype=torch.bool, device=device)
    for turn in range(7):
        result = plan(**arguments, pace=make_pace(device, (-1, int(whole.start[-1]) // 3, UNLIMITED), turn))
        runs = (result.current | result.pending) != 0
        for name in ('current', 'pending', 'rightmost'):
            assert getattr(result, name)[runs].equal(getattr(whole, name)[runs]), name
        ran |= runs
    assert ran.equal((whole.current | whole.pending) != 0)


def check_edges(device: str) -> None:
    """A ceiling that float64 misses by a bit, and a threshold that is met exactly by half of the tokens."""
    table, page_table = make_state(2, 32, device)
    state = state_columns(table, 32)
    for name, value in {'alive': 1, 'uncached': -1, 'masked': -1, 'pending': 0, 'progress': -1, 'decoded': 25,
                        'steps': 3, 'history': 64}.items():
        getattr(state, name).fill_(value)
    state.alpha.copy_(torch.tensor([1.32, 0.2], dtype=torch.float64))  # 11 and 1.7
    place = torch.arange(32, device=device).float()
    arguments = {
        'first': torch.zeros(2, 1, 32, device=device), 'second': torch.stack([-place, (place < 16).float()])[:, None],
        'table': table, 'entered': reference_enter.enter(table, page_table, PAGE_SIZE, make_pace(device), 32),
        'length': 32}
    assert check_step(arguments, {}, (UNLIMITED, UNLIMITED), 0, 128).current.tolist() == [(1 << 11) - 1, (1 << 16) - 1]


def check_not_numbers(device: str) -> None:
    """NaN deltas empty no sequence and disturb no other."""
    arguments = make((9, 16, 2), device, 1)
    clean = plan(**arguments, pace=make_pace(device)).current
    arguments['second'][::2] = float('nan')
    result = check_step(arguments, {}, (UNLIMITED, UNLIMITED), 0, 600)
    assert result.current[1::2].equal(clean[1::2])
    assert (result.current != 0).equal(arguments['entered'].current != 0)


def check_refusals(device: str) -> None:
    """What the kernels cannot take, and options that do not exist, raise and say which, what and why."""
    arguments = make((3, 16, 2), device) | {'pace': make_pace(device)}
    short = Plan.empty(3, 16, 96, device)
    short.sampled_position = short.sampled_position[:90]
    cut = Plan.empty(3, 16, 96, device)
    cut.source = cut.source[:90]
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({'first': arguments['first'].double()}, ('first', 'torch.float64', 'torch.float32')),
        ({'first': arguments['first'][:, 0]}, ('first', '(3, 16)', '[S, Hkv, L]')),
        ({'second': arguments['second'][:2]}, ('second', '(2, 2, 16)', '(3, 2, 16)')),
        ({'first': arguments['first'][..., :8].contiguous()}, ('first', '(3, 2, 8)', '(3, 2, 16)')),
        ({'table': arguments['table'][:, 1:]}, ('table', '(3, 44)', '45')),
        ({'length': 65}, ('length=65', '64')), ({'keep': 0}, ('keep=0', 'at least 1')),
        ({'selection': 'best'}, ("selection='best'", 'bottom')), ({'sequential': -1}, ('sequential=-1', 'at least 0')),
        ({'kv_visible': 'all'}, ("kv_visible='all'", 'reference')),
        ({'entered': Rows.empty(2, 16, 96, device)}, ('entered.start', '(3,)', '(4,)')),
        ({'out': Plan.empty(3, 8, 96, device)}, ('out.candidates', '(3, 8)', '(3, 16)')),
        ({'out': short}, ('out.sampled_position', '(90,)', '(96,)')), ({'out': cut}, ('out.source', '(90,)', '(96,)'))]
    expect_refusals(plan, arguments, refused)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        if shape[0] < 17:
            check_twin(shape, {}, 'cpu', seeds=1)
    arguments = make((17, 32, 3), 'cpu', 1)
    for limits in ((UNLIMITED, UNLIMITED), (150, UNLIMITED), (UNLIMITED, 70)):
        check_step(arguments, {}, limits, 5, 1100)
    for options in OPTIONS[1:]:
        for seed in range(2):
            check_step(make((4, 32, 1), 'cpu', seed), options, (UNLIMITED, UNLIMITED), 0, 256)
    check_rotation((3, 16, 1), 'cpu')
    check_company('cpu')
    check_edges('cpu')
    check_not_numbers('cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
