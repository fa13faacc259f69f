"""What must hold for the Triton settle, interpreted or compiled; run as a program it checks the small shapes."""
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from lmdeploy_focus.kernels import reference_settle
from lmdeploy_focus.kernels.layout import Pace, Plan, Rows, report_columns, report_width, state_columns, state_width
from lmdeploy_focus.kernels.settle import settle
from torch import Tensor

SMALL = [(1, 4), (3, 16), (9, 32), (9, 64), (5, 7), (2, 1)]  # S, L
LARGE = [(1200, 4), (512, 16), (256, 32), (256, 64), (300, 33)]
STRATEGIES = ('low_confidence_dynamic', 'low_confidence_static', 'sequential')
CACHES = ('delayed-neighbour', 'delayed', 'off')
OPTIONS: list[dict[str, Any]] = [
    {'strategy': strategy, 'cache': cache, 'tokens_per_step': per_step, 'full_commit': strategy == STRATEGIES[1]}
    for (strategy, per_step), cache in product(zip(STRATEGIES, (1, 3, 2), strict=True), CACHES)]
MASK_TOKEN = 999


def pack(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64."""
    return (flags.long() << torch.arange(flags.size(1))).sum(1)


def rows_of(kind: type[Rows], length: int, current: Tensor, pending: Tensor, **parts: Tensor) -> Any:
    """Rows or a Plan of which only what settle reads is filled."""
    return replace(kind.empty(current.size(0), length, 1, current.device), current=current, pending=pending, **parts)


def make(shape: tuple[int, int], device: str, seed: int = 0) -> dict[str, Any]:
    """Arguments of a step: blocks that are complete, untouched, one position from complete or in between; equal and
    meaningless scores, and more of them than there are sampled rows; a few kinds of tokens, so that stop words are
    hit; the mask token as a stop word; sequences that are dead, that did not enter or that have to wait."""
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
    current = masked | chance(.5, sequences, length)
    current[:, 0] |= ~current.any(1)
    kept = current & ~(masked & chance(.5, sequences, length) & chance(.7)[:, None])
    kept |= current & ~kept.any(1, keepdim=True)
    pending = chance(.5, sequences, length) & chance(.5)[:, None]
    alive, came, fits = ~chance(.1), ~chance(.1), ~chance(.1)
    current, pending = current & came[:, None], pending & came[:, None]
    runs = (came & fits)[:, None]
    kept = kept & runs
    sampled = (kept & masked).sum(1).cumsum(0)

    rows = sequences * length + 5
    scores = torch.where(chance(.5, rows), draw(0, 4, rows) / 4, torch.rand(rows, generator=random))
    scores = torch.where(chance(.1, rows), torch.tensor([float('nan'), float('inf'), -float('inf')])[draw(0, 3, rows)],
                         scores)
    stop_words = draw(-1, 9, sequences, int(draw(1, 5, 1))) * 3
    stop_words = stop_words.masked_fill(stop_words < 0, -1).masked_fill(stop_words == 24, MASK_TOKEN)

    table = draw(-9, 9, sequences, state_width(length))
    state = state_columns(table, length)
    state.ids.copy_(torch.where(masked & chance(.8, sequences, 1), MASK_TOKEN, draw(0, 99, sequences, length)))
    steps, history = draw(0, 4), draw(0, 9) * length
    for name, value in {
            'masked': pack(masked), 'uncached': torch.where(chance(.3), -1, pack(current)), 'pending': pack(pending),
            'progress': draw(-1, length), 'decoded': draw(0, 9) * steps, 'steps': steps, 'history': history,
            'appendable': torch.where(chance(.3), 999, draw(-length, 2 * length + 2)), 'random_offset': draw(0, 99),
            'output_start': history + draw(-length, length), 'alive': alive, 'alpha': torch.tensor(1.5),
            'threshold': torch.tensor([.25, .5, .7, .8], dtype=torch.float64)[draw(0, 4)]}.items():
        getattr(state, name).copy_(value)
    entered = rows_of(Rows, length, pack(current).to(device), pack(pending).to(device))
    plan = rows_of(Plan, length, pack(kept).to(device), pack(pending & runs).to(device),
                   rightmost=torch.where(kept, place, -1).amax(1).to(device),
                   sampled_start=torch.cat([sampled.new_zeros(1), sampled]).to(device))
    return {'table': table.to(device), 'entered': entered, 'plan': plan, 'pace': Pace.unlimited(device),
            'tokens': draw(0, 99, rows).to(device), 'scores': scores.to(device), 'stop_words': stop_words.to(device),
            'mask_token': MASK_TOKEN, 'length': length}


def check_twin(shape: tuple[int, int], options: dict[str, Any], device: str, seeds: int = 3) -> None:
    """Every value of the twin, in a new report and in one that held something else; bystanders stay as they are."""
    for seed in range(seeds):
        arguments = make(shape, device, seed)
        before = arguments['table'].clone()
        expected = before.clone()
        report = reference_settle.settle(**arguments | {'table': expected}, **options)
        out = torch.full_like(report, -7)
        assert settle(**arguments, **options, report=out) is out
        assert out.equal(report), (out - report).nonzero()
        assert arguments['table'].equal(expected), (arguments['table'] - expected).nonzero()
        idle = (arguments['plan'].current == 0) | (state_columns(before, shape[1]).alive == 0)
        assert expected[idle].equal(before[idle])
        told = report_columns(report, shape[1])
        assert told.ids[idle].equal(before[idle, :shape[1]])
        assert told.masked[idle].equal(state_columns(before, shape[1]).masked[idle])
        assert not report[idle, shape[1] + 1:].any() and told.ran.equal((~idle).long())
        assert arguments['pace'].turn.item() == 2  # the twin's and the kernel's
    assert settle(**arguments | {'table': before.clone()}, **options).equal(report)


def outcome(ids: list[int], start: int, cap: int, word: int) -> tuple[int, ...] | None:
    """What a complete block emits if it is the last one, None if it is not."""
    ends = [p for p, token in enumerate(ids) if token == word and p >= start][:1]
    ends += [cap - 1] * (cap <= len(ids))
    return tuple(ids[:max(min(ends) + 1, 0)]) if ends else None


def check_stops(device: str, every: int = 1, settle: Callable[..., Tensor] = settle) -> None:
    """A sequence stops exactly when all that its undecided positions may become leads to the same outcome: every
    pattern of undecided positions with every stop word, cap and start of the output around the block."""
    length, eos, other = 4, 7, 5
    cases = list(product(product((eos, other, MASK_TOKEN), repeat=length), range(-2, length + 2), range(length + 1)))
    cases = cases[::every]
    count = len(cases)

    def full(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    ids = torch.tensor([case[0] for case in cases])
    table = torch.zeros(count, state_width(length), dtype=torch.int64, device=device)
    state = state_columns(table, length)
    state.ids.copy_(ids)
    for name, value in {'masked': pack(ids == MASK_TOKEN), 'uncached': -1, 'history': 8, 'alive': 1,
                        'appendable': torch.tensor([case[1] for case in cases]),
                        'output_start': torch.tensor([case[2] for case in cases]) + 8}.items():
        getattr(state, name).copy_(torch.as_tensor(value))
    last = (ids[:, -1] == MASK_TOKEN).to(device)  # where position 3 is decided in this step
    plan = rows_of(Plan, length, full(8), full(0), sampled_start=torch.cat([full(0)[:1], last.cumsum(0)]))
    stop_words = torch.tensor([[-1, eos, MASK_TOKEN]], device=device).repeat(count, 1)
    report = settle(table, rows_of(Rows, length, full(15), full(0)), plan, Pace.unlimited(device), full(other),
                    torch.ones(count, device=device), stop_words, MASK_TOKEN, length)
    told = report_columns(report.cpu(), length)
    for s, (block, cap, start) in enumerate(cases):
        block = block[:-1] + (other if block[-1] == MASK_TOKEN else block[-1],)
        options = [(eos, other) if token == MASK_TOKEN else (token,) for token in block]
        outcomes = {outcome(list(ids), start, cap, eos) for ids in product(*options)}
        certain = len(outcomes) == 1 and outcomes != {None}
        assert told.ids[s].tolist() == list(block) and told.stopped[s] == certain, cases[s]
        assert state.alive[s] == (not certain)
        if certain:
            assert block[:max(int(told.stop_pos[s]) + 1, 0)] in outcomes and told.masked[s] == 0, cases[s]
            assert told.stop_pos[s] <= cap - 1, cases[s]
        else:
            assert told.stop_pos[s] == length - 1, cases[s]


def check_refusals(device: str) -> None:
    """What the kernel cannot take, and options that do not exist, raise."""
    arguments = make((3, 16), device)
    plan, table, stop_words = arguments['plan'], arguments['table'], arguments['stop_words']
    refused: list[dict[str, Any]] = [
        {'table': table[:, :-1]}, {'table': table[:, 1:]}, {'table': table.int()}, {'table': table[:0]},
        {'length': 65}, {'length': 15}, {'strategy': 'best'}, {'cache': 'on'}, {'tokens_per_step': 0},
        {'plan': replace(plan, current=plan.current.int())}, {'plan': replace(plan, rightmost=plan.rightmost[1:])},
        {'plan': replace(plan, sampled_start=plan.sampled_start[1:])},
        {'entered': replace(arguments['entered'], pending=plan.pending[1:])},
        {'scores': arguments['scores'][1:]}, {'scores': arguments['scores'].double()},
        {'tokens': arguments['tokens'].int()}, {'stop_words': stop_words[1:]}, {'stop_words': stop_words[:, :0]},
        {'report': torch.zeros(3, report_width(8), dtype=torch.int64, device=device)}]
    for changed in refused:
        with pytest.raises(ValueError):
            settle(**arguments | changed)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, {}, 'cpu', seeds=3)
    for options in OPTIONS:
        check_twin((7, 32), options, 'cpu', seeds=1)
        check_twin((5, 64), options | {'full_commit': not options['full_commit']}, 'cpu', seeds=1)
    check_stops('cpu', every=41)
    check_refusals('cpu')


if __name__ == '__main__':
    main()
