"""The Triton enter beside its twin, and the twin beside a simulation of one sequence at a time."""
from pathlib import Path

import pytest
import torch
from lmdeploy_focus.kernels import reference_enter

from . import enter_checks as checks
from . import rows_cases as cases
from . import rows_oracle as slow
from .interpreter import run_interpreted

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)
ROOT = Path(__file__).parents[2]
NAMES = [name for name in cases.ROWS if name != 'source']


def test_interpreter():
    """Red when: a map counts bit 63 as a sign or bits beyond the block, a dead sequence enters a row, a row lands in
    another's place or with another's token, page or keys, who waits or the totals are not the twin's, rows of a longer
    step stay behind, something is written beyond a buffer, or a refusal does not say what is wrong."""
    run_interpreted(checks)


@pytest.mark.parametrize('length', [4, 16, 32, 64])
@pytest.mark.parametrize('sequences', [1, 3, 17])
@OPTIONS
def test_twin_is_the_simulation(sequences, length, options):
    """Red when: the twin runs something else than the pending and uncached positions of those that are alive, in text
    order; shows a row other keys; lets a sequence overtake one that waits; forgets whose turn it is; or leaves dirt."""
    capacity = sequences * 2 * length + 5
    for seed in range(3):
        table, page_table = cases.make_state(sequences, length, 'cpu', seed)
        wanted = checks.wants(table, page_table, length)
        for turn in {0, 1, sequences - 1, 10**12 + seed}:
            for limit in [*cases.cuts(wanted, turn, seed), cases.UNLIMITED]:
                pace = cases.make_pace('cpu', (limit, -1, -1), turn)
                entered = reference_enter.enter(table, page_table, cases.PAGE_SIZE, pace, length, **options,
                                                out=cases.dirty(checks.Rows, sequences, length, capacity, 'cpu'))
                step = slow.enter(table, page_table, cases.PAGE_SIZE, turn, length,
                                  options.get('kv_visible', 'progress'), limit)
                step.expect(entered, length, NAMES, min(limit, capacity))
                told = pace.totals.tolist()
                assert told.pop(turn % 4) == [step.wanted, cases.DIRT, cases.DIRT, len(step.waiting)]
                assert told == [[cases.DIRT] * 4] * 3
                cases.assert_untouched(entered)


def test_everyone_is_first_once():
    """Red when: with room for one sequence another than that of the turn runs."""
    table, page_table = cases.make_state(17, 16, 'cpu', 3)
    state = cases.state_columns(table, 16)
    for name, value in {'alive': 1, 'pending': 0, 'uncached': -1, 'history': 32}.items():
        getattr(state, name).fill_(value)
    for turn in range(40):
        pace = cases.make_pace('cpu', (31, 0, 0), turn)
        entered = reference_enter.enter(table, page_table, cases.PAGE_SIZE, pace, 16)
        assert entered.current.nonzero().flatten().tolist() == [turn % 17]


def test_nobody_fits():
    """Red when: a sequence that is longer than the limit enters in part, or lets a shorter one behind it pass."""
    table, page_table = cases.make_state(3, 16, 'cpu', 3)
    state = cases.state_columns(table, 16)
    for name, value in {'alive': [1, 1, 1], 'pending': [0, 0, 0], 'uncached': [-1, 1, 1]}.items():
        getattr(state, name).copy_(torch.tensor(value))
    pace = cases.make_pace('cpu', (15, 0, 0), 3)
    entered = reference_enter.enter(table, page_table, cases.PAGE_SIZE, pace, 16)
    assert entered.start.tolist() == [0] * 4 and pace.totals[3].tolist() == [18, cases.DIRT, cases.DIRT, 3]
    assert entered.candidates.eq(-1).all() and entered.pages.eq(-1).all()


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter, or counts are added up wrongly beyond 512 sequences."""
    checks.check_twin(shape, options, 'cuda')


@pytest.mark.gpu
def test_rotation():
    """Red when: the kernel's turns are not the twin's."""
    checks.check_rotation((17, 64), 'cuda')
    checks.check_rotation((3, 16), 'cuda')


@pytest.mark.gpu
def test_dead():
    """Red when: a step without sequences leaves something behind."""
    checks.check_dead('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
