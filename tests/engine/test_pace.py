"""Room for the next step: from what steps before the last wanted, never from when the host looks."""
import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdeploy_focus.kernels.layout import TURNS, Pace

from lmdeploy_focus.engine.pace import Pacer

LENGTH = 32


def pacer(largest: int = 2**20, evicting: bool = True) -> Pacer:
    return Pacer(Pace.unlimited('cpu'), LENGTH, largest, evicting)


def step(own: Pacer, count: int, totals: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Predict a step of so many sequences, launch it, and let it tell its totals; the prediction."""
    told = own.pace.totals[own.turn % TURNS]
    rows = own.predict(count)
    own.launch(count, None)
    told.copy_(torch.tensor(totals))
    return rows


def steps(seed: int, number: int = 12) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Random counts and totals."""
    own = random.Random(seed)
    made = []
    for _ in range(number):
        count = own.randint(1, 200)
        enter = own.randint(count, 2 * count * LENGTH)
        keep = own.randint(count, enter)
        made.append((count, (enter, keep, own.randint(count, keep), own.choice([0, 0, own.randint(0, count)]))))
    return made


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 250))
def test_the_last_step_is_not_looked_at(seed, count):
    """It may not be over. Red when: a prediction reads totals that a step on the device is still writing, or forgets
    those of the step before."""
    own = pacer()
    for own_count, totals in steps(seed):
        step(own, own_count, totals)
    expected = copy.deepcopy(own).predict(count)
    last = (own.turn - 1) % TURNS
    for row in range(TURNS):
        changed = copy.deepcopy(own)
        changed.pace.totals[row, :3] = 200 * LENGTH * 2
        if row == last:
            assert changed.predict(count) == expected
        elif row == (last - 1) % TURNS and count > 2:
            assert changed.predict(count) >= expected and changed.predict(count)[0] > expected[0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(0, 3))
def test_the_same_steps_get_the_same_room(seed, times):
    """Red when: how often the host asks, or when a step's totals arrive between its launch and the end of the next one,
    changes a prediction."""
    one, other = pacer(), pacer()
    late = None
    for count, totals in steps(seed):
        for _ in range(times):
            other.predict(count)
        rows = other.predict(count)
        if late is not None:  # the totals of the step before, just in time
            other.pace.totals[late[0]].copy_(torch.tensor(late[1]))
        late = (other.turn % TURNS, totals)
        other.launch(count, None)
        assert step(one, count, totals) == rows


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 300), st.sampled_from((2 * LENGTH, 100, 999, 10**5)), st.booleans(),
       st.lists(st.integers(0, 50), max_size=5))
def test_room_is_bounded(seed, count, largest, evicting, joins):
    """Red when: a step is given more room than it can use or than there are buffers; no room for the one sequence whose
    turn it is, which would wait forever; or more rows to sample than to keep."""
    own = pacer(largest, evicting)
    for other_count, totals in steps(seed):
        step(own, other_count, totals)
    for sequences in joins:
        own.join(sequences)
    enter, keep, draw = own.predict(count)
    most = min(2 * count * LENGTH, largest)
    assert draw <= keep <= most and enter <= most
    assert enter >= min(2 * LENGTH, most) and keep >= min(2 * LENGTH, most) and draw >= LENGTH


def test_small_batches_have_room_for_everything():
    """Red when: one of two sequences has to wait, whatever was seen before."""
    own = pacer()
    for _ in range(5):
        step(own, 100, (100, 100, 100, 0))
    for count in (1, 2):
        assert own.predict(count) == (2 * count * LENGTH, 2 * count * LENGTH, count * LENGTH)


def test_first_steps():
    """Red when: the first step of a batch has no room for whole blocks to enter, or a step that does not evict none for
    them to stay."""
    enter, keep, draw = pacer().predict(100)
    assert 100 * LENGTH <= enter <= 1.1 * 100 * LENGTH + 300 and keep < 0.4 * enter and draw <= keep
    enter, keep, draw = pacer(evicting=False).predict(100)
    assert min(enter, keep, draw) >= 100 * LENGTH


def test_a_steady_batch():
    """Red when: the mean does not find what steps want, or room is far from it."""
    own = pacer()
    for _ in range(60):
        rows = step(own, 100, (900, 500, 300, 0))
    for room, wanted in zip(rows, (900, 500, 300), strict=True):
        assert wanted <= room <= wanted + 300
    assert own.deferred == 0


def test_sequences_that_join_enter_whole_blocks():
    """Red when: room for new sequences comes too late, or stays for steps that the mean covers."""
    own = pacer()
    for _ in range(60):
        step(own, 100, (900, 500, 300, 0))
    quiet = own.predict(150)
    own.join(20)
    own.join(30)
    for _ in range(TURNS - 1):
        assert own.predict(150) == (quiet[0] + 50 * LENGTH, *quiet[1:])
        own.launch(150, None)
        own.pace.totals[(own.turn - 1) % TURNS] = torch.tensor((1350, 750, 450, 0))
    assert own.predict(150)[0] < quiet[0] + LENGTH


@pytest.mark.parametrize('wanted', [(2000, 500, 300), (900, 1500, 300), (900, 1100, 1000)])
def test_room_grows_where_sequences_wait(wanted):
    """Red when: a batch that wants more than its room never gets it, or those who wait lower the mean."""
    own = pacer()
    for _ in range(60):
        step(own, 100, (900, 500, 300, 0))
    before = own.predict(100)
    late, fits = 0, False
    while not fits:
        fits = all(have >= want for have, want in zip(own.predict(100), wanted, strict=True))
        step(own, 100, (*wanted, 0 if fits else 7))
        late += not fits
        assert late < 20
    assert late
    for room, old, want in zip(own.predict(100), before, wanted, strict=True):
        assert room >= min(old, want)
    assert own.deferred == 7 * late


def test_waiting_does_not_lower_the_mean():
    """Nine tenths wait: the others' few rows are not the batch's. Red when: room shrinks while sequences wait."""
    own = pacer()
    for _ in range(60):
        step(own, 100, (2000, 1000, 800, 0))
    before = own.predict(100)
    for _ in range(10):
        step(own, 100, (2000, 100, 80, 90))
    assert own.predict(100) == before
    assert own.deferred == 9 * 90


def test_an_empty_step():
    """Red when: a step without sequences divides by zero, or moves the mean."""
    own = pacer()
    for _ in range(9):
        step(own, 100, (900, 500, 300, 0))
    before = own.predict(100)
    step(own, 0, (0, 0, 0, 0))
    step(own, 100, (900, 500, 300, 0))
    after = own.predict(100)
    assert all(abs(a - b) <= .1 * b for a, b in zip(after, before, strict=True))
