"""What must hold for the Triton enter, interpreted or compiled; run as a program it checks the small shapes."""
from dataclasses import fields
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_enter
from lmdeploy_focus.kernels.enter import Entered, enter
from torch import Tensor

SMALL = [(1, 4), (3, 16), (9, 32), (9, 64), (5, 7)]  # S, L
LARGE = [(1100, 4), (512, 16), (256, 32), (256, 64), (513, 33)]
OPTIONS: list[dict[str, Any]] = [
    {}, {'full_commit': True}, {'cache': 'off'}, {'cache': 'delayed', 'kv_visible': 'reference'},
    {'cache': 'off', 'full_commit': True}]


def pack(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64."""
    return (flags.long() << torch.arange(flags.size(1))).sum(1)


def make(shape: tuple[int, int], device: str, seed: int = 0) -> dict[str, Any]:
    """Arguments of a step: fresh blocks, finished ones, of which nothing or something is still uncached, and others."""
    sequences, length = shape
    random = torch.Generator().manual_seed(seed + sum(shape))

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (sequences,), generator=random)

    kind = draw(0, 5)[:, None]
    ends = torch.where(draw(0, 2) == 0, length, draw(1, length + 1))[:, None]  # progress may lie beyond all rows
    masked = torch.where(kind < 3, kind == 0, draw(0, 2, sequences, length) == 0) & (torch.arange(length) < ends)
    cached = (kind > 1) & ~masked & (draw(0, 2, sequences, length) == 0)
    undecided = (draw(0, 3, sequences, 1) > 0) & (draw(0, 2, sequences, length) == 0) & (torch.arange(length) < ends)
    uncached = pack(masked | undecided)
    arguments = {
        'ids': draw(0, 10**6, sequences, length), 'masked': pack(masked), 'cached': pack(cached),
        'uncached': torch.where(masked.all(1), -1, uncached), 'history': draw(0, 50) * length,
        'progress': draw(-1, length), 'page_table': draw(1, 2**31 - 1, sequences, 80), 'page_size': 48}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def assert_same(actual: Entered, expected: Entered) -> None:
    """All fields, bit for bit."""
    for f in fields(Entered):
        a, b = getattr(actual, f.name), getattr(expected, f.name)
        assert a.dtype == b.dtype and a.equal(b), (f.name, a, b)


def check_twin(shape: tuple[int, int], options: dict[str, Any], device: str, seeds: int = 2) -> None:
    """Every value of the twin, in buffers that held something else; all sequences, none, and some."""
    for seed in range(seeds):
        arguments = make(shape, device, seed)
        for count in (None, 0, shape[0] // 2 + 1):
            real = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
            out = Entered.empty(*shape, device)
            for f in fields(Entered):
                getattr(out, f.name).fill_(-7)
            assert enter(**arguments, **options, count=real, out=out) is out
            assert_same(out, reference_enter.enter(**arguments, **options, count=real))


def check_refusals(device: str) -> None:
    """What the kernels cannot take, and options that do not exist, raise."""
    arguments = make((3, 16), device)
    refused: list[dict[str, Any]] = [
        {'ids': arguments['ids'].int()}, {'ids': arguments['ids'].repeat(1, 5)}, {'masked': arguments['masked'][:2]},
        {'page_table': arguments['page_table'][:2]}, {'page_size': 0}, {'cache': 'on'}, {'kv_visible': 'all'},
        {'count': torch.zeros(2, dtype=torch.int32, device=device)}, {'out': Entered.empty(3, 8, device)}]
    for changed in refused:
        try:
            enter(**arguments | changed)
        except ValueError:
            continue
        raise AssertionError(changed)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, {}, 'cpu', seeds=1)
    for options in OPTIONS:
        check_twin((6, 33), options, 'cpu', seeds=1)
    check_refusals('cpu')


if __name__ == '__main__':
    main()
