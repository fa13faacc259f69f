"""What must hold for the Triton plan, interpreted or compiled; run as a program it checks the small shapes."""
from dataclasses import fields
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_plan
from lmdeploy_focus.kernels.plan import Plan, plan
from torch import Tensor

SMALL = [(1, 4, 1), (3, 16, 2), (17, 32, 3), (17, 64, 8), (5, 7, 1)]  # S, L, key heads
LARGE = [(600, 4, 1), (1100, 8, 2), (512, 16, 8), (256, 32, 8), (256, 64, 4), (1, 64, 8), (513, 33, 5)]
OPTIONS: list[dict[str, Any]] = [
    {}, {'kv_visible': 'reference'}, {'sequential': 2}, {'keep': 1}, {'keep': 64}, {'keep': 3, 'sequential': 4},
    {'selection': 'bottom'}, {'selection': 'random'}, {'selection': 'random', 'keep': 2, 'kv_visible': 'reference'}]


def pack(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64."""
    return (flags.long() << torch.arange(flags.size(1))).sum(1)


def make(shape: tuple[int, int, int], device: str, seed: int = 0, full: bool = False) -> dict[str, Any]:
    """Arguments of a plan: 0, 1, L and other numbers of masked tokens; deltas wide apart, equal, and of two values (a
    threshold met exactly, ties in the ranking); sequences without a row unless `full`."""
    sequences, length, kv_heads = shape
    random = torch.Generator().manual_seed(seed + sum(shape))

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (sequences,), generator=random)

    share = torch.tensor([0., .02, .5, .9, 1.])[draw(0, 5)][:, None]
    masked = torch.rand(sequences, length, generator=random) < share
    entering = masked | (torch.rand(sequences, length, generator=random) < .4)
    ends = torch.where(draw(0, 2) == 0, length, draw(1, length + 1))[:, None]  # progress may lie beyond all rows
    masked, entering = masked & (torch.arange(length) < ends), entering & (torch.arange(length) < ends)
    if full:
        entering[:, 0] |= ~entering.any(1)
    else:
        empty = draw(0, 6) == 0
        entering = entering & ~empty[:, None]  # their masked positions are none of this step's
    beyond = (draw(0, 2) * -1) << length if length < 64 else 0  # bits that are no positions
    kind = draw(0, 3)[:, None, None]
    partials = []
    for _ in range(2):
        wide = torch.randn(sequences, kv_heads, length, generator=random) * 4
        two = draw(0, 2, sequences, kv_heads, length) * (torch.arange(kv_heads) == 0)[:, None] / 8
        partials.append(torch.where(kind == 0, wide, torch.where(kind == 1, two, 0.5)))
    partials[0] = torch.where(kind == 0, partials[0], 0.25)
    steps = draw(0, 4)
    arguments = {
        'first': partials[0], 'second': partials[1], 'entering': pack(entering) | beyond,
        'masked': pack(masked) | beyond,
        'q_start': torch.cat([torch.zeros(1, dtype=torch.int64), entering.sum(1).cumsum(0)]),
        'history': draw(0, 50) * length, 'page_table': draw(1, 2**31 - 1, sequences, 80).int(), 'page_size': 48,
        'progress': draw(-1, length), 'decoded': torch.tensor([1, 2, 3, 10, 10])[draw(0, 5)] * steps, 'steps': steps,
        'alpha': torch.tensor([1., 1.1, 1.2, 1.5, 2.7], dtype=torch.float64)[draw(0, 5)]}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def assert_same(actual: Plan, expected: Plan) -> None:
    """All fields, bit for bit."""
    for f in fields(Plan):
        a, b = getattr(actual, f.name), getattr(expected, f.name)
        assert a.dtype == b.dtype and a.equal(b), (f.name, a, b)


def check_twin(shape: tuple[int, int, int], options: dict[str, Any], device: str, seeds: int = 2) -> None:
    """Every value of the twin, in buffers that held something else."""
    for seed in range(seeds):
        arguments = make(shape, device, seed)
        out = Plan.empty(*shape[:2], device)
        for f in fields(Plan):
            getattr(out, f.name).fill_(-7)
        assert plan(**arguments, **options, out=out) is out
        assert_same(out, reference_plan.plan(**arguments, **options))


def check_edges(device: str) -> None:
    """A ceiling that float64 misses by a bit, and a threshold that is met exactly by half of the tokens."""
    arguments = make((2, 32, 1), device, full=True)
    for name, value in {'entering': -1, 'masked': -1, 'progress': -1, 'decoded': 25, 'steps': 3}.items():
        arguments[name].fill_(value)
    arguments['q_start'] = torch.arange(3, device=device) * 32
    arguments['first'].zero_()
    place = torch.arange(32, device=device)
    arguments['second'][0], arguments['second'][1] = -place.float(), (place < 16).float()
    arguments['alpha'] = torch.tensor([1.32, 0.2], dtype=torch.float64, device=device)  # 11 and 1.7
    result = plan(**arguments)
    assert result.kept.tolist() == [(1 << 11) - 1, (1 << 16) - 1]
    assert_same(result, reference_plan.plan(**arguments))


def check_not_numbers(device: str) -> None:
    """NaN deltas empty no sequence and disturb no other."""
    arguments = make((17, 16, 2), device, full=True)
    clean = plan(**arguments).kept
    arguments['second'][::2] = float('nan')
    assert_same(plan(**arguments), reference_plan.plan(**arguments))
    assert plan(**arguments).kept[1::2].equal(clean[1::2])


def check_refusals(device: str) -> None:
    """What the kernels cannot take, and options that do not exist, raise."""
    arguments = make((3, 16, 2), device)
    table, out = arguments['page_table'], Plan.empty(3, 8, device)
    refused: list[dict[str, Any]] = [
        {'first': arguments['first'].half()}, {'second': arguments['second'][:, :1]}, {'page_size': 0}, {'out': out},
        {'masked': arguments['masked'][:2]}, {'alpha': arguments['alpha'].float()}, {'page_table': table[:2]},
        {'page_table': table.T.contiguous().T}, {'q_start': arguments['q_start'][1:]}, {'keep': 0},
        {'selection': 'best'}, {'kv_visible': 'all'}, {'sequential': -1},
        {'first': arguments['first'].repeat(1, 1, 5), 'second': arguments['second'].repeat(1, 1, 5)}]
    for changed in refused:
        try:
            plan(**arguments | changed)
        except ValueError:
            continue
        raise AssertionError(changed)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, {}, 'cpu')
    for options in OPTIONS:
        check_twin((7, 32, 1), options, 'cpu', seeds=1)
    check_edges('cpu')
    check_not_numbers('cpu')
    check_refusals('cpu')
    nothing = {name: value[:0] if isinstance(value, Tensor) and name != 'q_start' else value
               for name, value in make((3, 16, 2), 'cpu').items()} | {'q_start': torch.zeros(1, dtype=torch.int64)}
    assert_same(plan(**nothing), reference_plan.plan(**nothing))


if __name__ == '__main__':
    main()
