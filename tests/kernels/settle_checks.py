"""What must hold for the Triton settle, interpreted or compiled; run as a program it checks the small shapes."""
import copy
from dataclasses import fields
from itertools import product
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_settle
from lmdeploy_focus.kernels.settle import Blocks, Settled, settle
from torch import Tensor

SMALL = [(1, 4), (3, 16), (9, 32), (9, 64), (5, 7)]  # S, L
LARGE = [(1200, 4), (512, 16), (256, 32), (256, 64), (300, 33)]
STRATEGIES = ('low_confidence_dynamic', 'low_confidence_static', 'sequential')
OPTIONS: list[dict[str, Any]] = [
    {'strategy': strategy, 'cache': cache, 'tokens_per_step': per_step}
    for (strategy, per_step), cache in product(zip(STRATEGIES, (1, 3, 2), strict=True),
                                               ('delayed-neighbour', 'delayed', 'off'))]
MASK_TOKEN = 999


def pack(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64."""
    return (flags.long() << torch.arange(flags.size(1))).sum(1)


def make(shape: tuple[int, int], device: str, seed: int = 0, idle: bool = True) -> dict[str, Any]:
    """Arguments of a step: blocks that are complete, untouched, one step from complete or in between; equal and
    meaningless scores; a few kinds of tokens, so that stop words are hit; with `idle` sequences that entered no row."""
    sequences, length = shape
    random = torch.Generator().manual_seed(seed + sum(shape))

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (sequences,), generator=random)

    def chance(share: float, *size: int) -> Tensor:
        return torch.rand(*(size or (sequences,)), generator=random) < share

    place = torch.arange(length)
    kind = draw(0, 5)[:, None]
    masked = torch.where(kind == 0, False, torch.where(kind == 1, True, torch.where(
        kind == 2, place == draw(0, length)[:, None], chance(.5, sequences, length))))
    cached = (kind == 4) & (place < draw(0, length)[:, None]) & ~masked
    entering = masked | chance(.5, sequences, length)
    entering[:, 0] |= ~entering.any(1)
    kept = entering & ~(masked & chance(.5, sequences, length))
    kept |= entering & ~kept.any(1, keepdim=True)
    if idle:
        live = ~chance(.15)[:, None]
        entering, kept = entering & live, kept & live
    sampled = (kept & masked).sum(1).cumsum(0)
    rows = sequences * length
    scores = torch.where(chance(.5, rows), draw(0, 4, rows) / 4, torch.rand(rows, generator=random))
    scores = torch.where(chance(.1, rows), torch.tensor([float('nan'), float('inf'), -float('inf')])[draw(0, 3, rows)],
                         scores)
    steps, history = draw(0, 4), draw(0, 9) * length
    width = [None, 0, 1, 3][int(draw(0, 4, 1))]
    stop_words = None if width is None else draw(-1, 4, sequences, width) * 3
    beyond = (draw(0, 2) * -1) << length if length < 64 else 0  # bits that are no positions
    ids = torch.where(masked & chance(.8, sequences, 1), MASK_TOKEN, draw(0, 13, sequences, length))
    blocks = Blocks(ids=ids, masked=pack(masked) | beyond, cached=pack(cached),
                    uncached=torch.where(chance(.3), -1, pack(entering)), progress=draw(-1, length),
                    decoded=draw(0, 9) * steps, steps=steps, history=history,
                    appendable=draw(-length, 2 * length + 2), random_offsets=draw(0, 99))
    arguments = {
        'blocks': blocks, 'entering': pack(entering), 'kept': pack(kept),
        'sampled_start': torch.cat([sampled.new_zeros(1), sampled]),
        'rightmost': torch.where(kept, place, -1).amax(1), 'tokens': draw(0, 13, rows), 'scores': scores,
        'threshold': torch.tensor([.25, .5, .8])[draw(0, 3)], 'output_start': history + draw(-length, length),
        'stop_words': stop_words, 'mask_token': MASK_TOKEN}
    arguments['blocks'] = Blocks(**{name: value.to(device) for name, value in vars(blocks).items()})
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def flat(settled: Settled) -> dict[str, Tensor]:
    """All tensors by name."""
    own = {f.name: getattr(settled, f.name) for f in fields(Settled) if f.name != 'next'}
    return own | {f'next.{name}': value for name, value in vars(settled.next).items()}


def assert_same(actual: Settled, expected: Settled) -> None:
    """All fields, bit for bit."""
    other = flat(expected)
    for name, value in flat(actual).items():
        assert value.dtype == other[name].dtype and value.equal(other[name]), (name, value, other[name])


def check_twin(shape: tuple[int, int], options: dict[str, Any], device: str, seeds: int = 3) -> None:
    """Every value of the twin: in new tensors, in buffers that held something else, and in place of the input."""
    for seed in range(seeds):
        arguments = make(shape, device, seed)
        expected = reference_settle.settle(**arguments, **options)
        out = Settled.empty(*shape, device)
        for value in flat(out).values():
            value.fill_(1)
        before = copy.deepcopy(arguments['blocks'])
        assert settle(**arguments, **options, out=out) is out
        assert_same(out, expected)
        assert all(value.equal(vars(before)[name]) for name, value in vars(arguments['blocks']).items())
        out.next = arguments['blocks']
        assert_same(settle(**arguments, **options, out=out), expected)


def check_stops(device: str) -> None:
    """Every end-of-sequence position with every cap around it and every start of the output: the first one ends it."""
    length, eos = 4, 7
    cases = list(product(range(length + 1), range(1, length + 2), range(length + 1)))
    count = len(cases)

    def full(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    ids = torch.full((count, length + 1), 5)
    ids[torch.arange(count), torch.tensor([case[0] for case in cases])] = eos
    cap, start = (torch.tensor([case[i] for case in cases], device=device) for i in (1, 2))
    ids = ids[:, :length].to(device)
    tokens = ids[:, -1].clone()  # the last position is decided in this step
    ids = torch.where(torch.arange(length, device=device) == length - 1, MASK_TOKEN, ids)
    blocks = Blocks(ids=ids, masked=full(8), cached=full(0), uncached=full(-1),
                    progress=full(3), decoded=full(4), steps=full(1), history=full(8), appendable=cap,
                    random_offsets=full(0))
    arguments = {
        'blocks': blocks, 'entering': full(15), 'kept': full(15), 'rightmost': full(3),
        'sampled_start': torch.arange(count + 1, device=device), 'tokens': tokens,
        'scores': torch.zeros(count, device=device), 'threshold': torch.ones(count, device=device),
        'output_start': start + 8, 'stop_words': torch.tensor([[-1, eos]], device=device).repeat(count, 1),
        'mask_token': MASK_TOKEN}
    blocks.cached[-1] = 1  # not complete: neither stop word nor cap is due, and the last case's cap is not met
    settled = settle(**arguments)
    assert_same(settled, reference_settle.settle(**arguments))
    for s, (word, allowed, first) in enumerate(cases[:-1]):
        ends = [length - 1] + [allowed - 1] * (allowed <= length) + [word] * (first <= word < length)
        assert settled.stop_pos[s] == min(ends) and settled.stopped[s] == (len(ends) > 1), cases[s]
    assert not settled.stopped[-1]


def check_refusals(device: str) -> None:
    """What the kernel cannot take, and options that do not exist, raise."""
    arguments = make((3, 16), device)
    short = copy.copy(arguments['blocks'])
    short.steps = short.steps[:2]
    long = Settled.empty(3, 65, device).next
    refused: list[dict[str, Any]] = [
        {'blocks': short}, {'blocks': long}, {'kept': arguments['kept'].int()}, {'strategy': 'best'}, {'cache': 'on'},
        {'tokens_per_step': 0}, {'threshold': arguments['threshold'].double()}, {'scores': arguments['scores'][1:]},
        {'sampled_start': arguments['sampled_start'][1:]}, {'out': Settled.empty(3, 8, device)},
        {'stop_words': torch.zeros(2, 1, dtype=torch.int64, device=device)}]
    for changed in refused:
        try:
            settle(**arguments | changed)
        except ValueError:
            continue
        raise AssertionError(changed)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, {}, 'cpu', seeds=2)
    for options in OPTIONS:
        check_twin((7, 32), options, 'cpu', seeds=1)
    check_stops('cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
