"""The Triton plan beside its twin, and the twin beside a simulation of one sequence at a time."""
from pathlib import Path

import numpy as np
import pytest
import torch
from lmdeploy_focus.kernels import enter, plan, reference_enter, reference_plan

from . import plan_checks as checks
from . import rows_cases as cases
from . import rows_oracle as slow
from .interpreter import run_interpreted
from .select_cases import deltas

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)
ROOT = Path(__file__).parents[2]


def test_interpreter():
    """Red when: a rule of the selection differs from the twin's (threshold, ties, neighbour, placeholders, never
    empty), alpha is rounded to float32, bit 63 is taken for a sign, a row lands in another's place, who waits or the
    totals are not the twin's, what a sequence keeps hangs on who waits, rows of a longer step stay behind, something is
    written beyond a buffer, or a refusal does not say what is wrong."""
    run_interpreted(checks)


@pytest.mark.parametrize('length', [4, 16, 32, 64])
@pytest.mark.parametrize('sequences', [1, 3, 17])
@OPTIONS
def test_twin_is_the_simulation(sequences, length, options):
    """Red when: the twin's budget, kept set, rows, keys, samples or totals are not those of exact arithmetic, a pending
    row is evicted, a sequence overtakes one that waits for either of the limits, or dirt is left."""
    capacity = sequences * 2 * length
    for seed in range(2):
        arguments, exact = partials(sequences, length, seed)
        table, page_table = cases.make_state(sequences, length, 'cpu', seed)
        rows, sampled = checks.wants(arguments(cases.UNLIMITED, 0), options)
        for turn in {0, sequences - 1, 10**12 + seed}:
            limits = zip(cases.cuts(rows, turn, seed), cases.cuts(sampled, turn, seed), strict=True)
            some, few = [*limits][2:4]
            for enters, keeps, samples in [(cases.UNLIMITED,) * 3, (cases.UNLIMITED, *some),
                                           (cases.UNLIMITED, cases.UNLIMITED, few[1]),
                                           (cases.UNLIMITED, few[0], cases.UNLIMITED),
                                           (int(rows.sum()) // 2, cases.UNLIMITED, some[1])]:
                given = arguments(enters, turn)
                pace = cases.make_pace('cpu', (enters, keeps, samples), turn)
                result = reference_plan.plan(**given, **options, pace=pace,
                                             out=cases.dirty(checks.Plan, sequences, length, capacity, 'cpu'))
                before = slow.enter(table, page_table, cases.PAGE_SIZE, turn, length, 'progress', enters)
                own = [exact[s][:sum(row.masked for row in before.rows[s])] for s in range(sequences)]
                step = slow.plan(before, table, own, turn, length, (keeps, samples), **options)
                step.expect(result, length, cases.ROWS, min(keeps, capacity))
                expect_samples(result, step, min(samples, capacity))
                assert pace.totals[turn % 4].tolist() == [cases.DIRT, step.wanted, step.sampled_wanted,
                                                          len(step.waiting)]
                cases.assert_untouched(result)


def partials(sequences, length, seed):
    """Arguments of a plan by the limit of its enter and turn, and each sequence's exact deltas; the deltas are those
    of select_cases, all in one of three heads, so that no sum rounds."""
    random = np.random.default_rng(1000 * seed + 10 * sequences + length)
    given = checks.make((sequences, length, 3), 'cpu', seed)
    masked = cases.state_columns(given['table'], length).masked & given['entered'].current
    first, second = torch.zeros(2, sequences, 3, length)
    exact = []
    for s, bits in enumerate(masked.tolist()):
        own = deltas(random, (bits & (1 << length) - 1).bit_count())
        head = random.integers(3)
        second[s, head, :len(own)] = torch.from_numpy(own)
        exact.append(own.tolist())
    return lambda limit, turn: checks.make((sequences, length, 3), 'cpu', seed, limit, turn) | {
        'first': first, 'second': second}, exact


def expect_samples(result, step, limit):
    """The sampled rows of a plan, and the largest position of each sequence."""
    chosen = [(i, row.sequence, row.position) for i, row in enumerate(step.numbered()) if row.masked]
    padding = [0] * (limit - len(chosen))
    for name, values in zip(cases.SAMPLED, zip(*chosen, strict=True) if chosen else [()] * 3, strict=True):
        assert getattr(result, name)[:limit].tolist() == [*values, *padding], name
    counts = [sum(row.masked for row in own) for own in step.rows]
    assert result.sampled_start.tolist() == [sum(counts[:s]) for s in range(len(counts) + 1)]
    assert result.rightmost.tolist() == [max([row.position for row in own if row.position >= 0], default=-1)
                                         for own in step.rows]


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter, or counts are added up wrongly beyond 512 sequences."""
    checks.check_twin(shape, options, 'cuda', seeds=1 if shape[0] > 17 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize('check', ['company', 'edges', 'not_numbers', 'refusals'])
def test_check(check):
    """Red when: as in the interpreter; on a GPU also when the budget loses its slack in float64 arithmetic."""
    getattr(checks, f'check_{check}')('cuda')


@pytest.mark.gpu
def test_rotation():
    """Red when: the kernel's turns are not the twin's."""
    checks.check_rotation((17, 64, 1), 'cuda')
    checks.check_rotation((3, 16, 1), 'cuda')


@pytest.mark.gpu
def test_graph():
    """Red when: a captured step depends on anything but what its tensors hold when it is replayed, such as the turn,
    the limits or the number of sequences that were alive at capture."""
    shape = (17, 32, 2)
    pace = cases.make_pace('cuda')
    table, page_table = cases.make_state(17, 32, 'cuda')
    first, second = checks.make_partials(shape, 'cuda', 0)
    entered = cases.dirty(checks.Rows, 17, 32, 17 * 64, 'cuda')
    out = cases.dirty(checks.Plan, 17, 32, 17 * 64, 'cuda')

    def step() -> None:
        enter.enter(table, page_table, cases.PAGE_SIZE, pace, 32, out=entered)
        plan.plan(first, second, table, entered, pace, 32, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(2, 12, 2):
        table.copy_(cases.make_state(17, 32, 'cuda', seed)[0])
        limits = (100 * seed, 70 * seed, 50 * seed)
        twins = cases.make_pace('cuda', limits, seed)
        pace.limits.copy_(twins.limits)
        pace.turn.copy_(twins.turn)
        pace.totals.fill_(cases.DIRT)
        graph.replay()
        expected = reference_enter.enter(table, page_table, cases.PAGE_SIZE, twins, 32)
        cases.assert_same(entered, expected, limits[0])
        expected = reference_plan.plan(first, second, table, expected, twins, 32)
        cases.assert_same(out, expected, *limits[1:])
        cases.assert_told(pace, twins)
