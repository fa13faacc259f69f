"""Random states, limits and dirty buffers for the tests of `enter` and `plan`."""
from dataclasses import fields
from typing import TypeVar

import torch
from lmdeploy_focus.kernels.layout import TOTALS, TURNS, Pace, Plan, Rows, state_columns, state_width
from torch import Tensor

AnyRows = TypeVar('AnyRows', Rows, Plan)

PAGE_SIZE = 48  # so that blocks of 32 cross a page
PAGES = 80
UNLIMITED = 2**31 - 1
DIRT = -7
GUARD = 5
# fields whose entries beyond a step's limit may be anything, and the limit that they obey
ROWS = ('sequence', 'position', 'position_ids', 'input_ids', 'pages', 'offsets', 'visible', 'source')
SAMPLED = ('sampled', 'sampled_sequence', 'sampled_position')
ALPHAS = (1., 1.1, 1.2, 1.5, 2.7)


def pack(flags: Tensor) -> Tensor:
    """[S, L] bool -> [S] int64."""
    return (flags.long() << torch.arange(flags.size(1))).sum(1)


def make_state(sequences: int, length: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A table of states, its rows further apart than they are wide, and a page table, int64 or int32 by the seed.

    Blocks have 0, 1, L and other numbers of masked tokens; a third have something of the block before to commit, some
    all of it; a fifth of the sequences are dead and full of rubbish; bits beyond the block are set in some maps.
    """
    random = torch.Generator().manual_seed(1000 * seed + 100 * sequences + length)

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (sequences,), generator=random)

    share = torch.tensor([0., .02, .5, .9, 1.])[draw(0, 5)][:, None]
    ends = torch.where(draw(0, 2) == 0, length, draw(1, length + 1))[:, None]  # progress may lie beyond all rows
    masked = (torch.rand(sequences, length, generator=random) < share) & (torch.arange(length) < ends)
    uncached = masked | ((torch.rand(sequences, length, generator=random) < .4) & (torch.arange(length) < ends))
    uncached[:, 0] |= ~uncached.any(1)  # a sequence that is alive always has something to run
    kind = draw(0, 6)[:, None]
    pending = ((kind == 0) | ((kind == 1) & (draw(0, 2, sequences, length) == 0))).expand(-1, length)
    beyond = (draw(0, 2) * -1) << length if length < 64 else 0
    table = draw(-2**62, 2**62, sequences, state_width(length) + 3)[:, :state_width(length)]
    state = state_columns(table, length)
    state.ids[:], state.pending_ids[:] = draw(0, 10**6, sequences, length), draw(0, 10**6, sequences, length)
    state.alive[:] = draw(0, 5) > 0
    alive = state.alive != 0
    steps = draw(0, 4)
    values = {
        'masked': pack(masked) | beyond, 'uncached': pack(uncached) | beyond, 'pending': pack(pending),
        'progress': draw(-1, length), 'steps': steps, 'decoded': torch.tensor([1, 2, 3, 10, 10])[draw(0, 5)] * steps,
        'history': draw(1, 50) * length}
    for name, value in values.items():
        getattr(state, name)[alive] = value[alive]
    state.alpha[alive] = torch.tensor(ALPHAS, dtype=torch.float64)[draw(0, 5)][alive]
    page_table = draw(1, 2**31 - 1, sequences, PAGES)
    if device != 'cpu':
        wide = torch.zeros(sequences, state_width(length) + 3, dtype=torch.int64, device=device)
        wide[:, :state_width(length)] = table
        table = wide[:, :state_width(length)]
    return table, (page_table.int() if seed % 2 else page_table).to(device)


def cuts(wanted: Tensor, turn: int, seed: int) -> list[int]:
    """Limits for sequences that want so many rows [S]: none fits, the first just does not, some fit, all just fit."""
    total = int(wanted.sum())
    ready = [own for own in wanted.roll(-(turn % wanted.numel())).tolist() if own]
    some = int(torch.randint(total + 1, (1,), generator=torch.Generator().manual_seed(seed)))
    return [0, max(0, ready[0] - 1) if ready else 0, some, max(0, total - 1), total]


def make_pace(device: str, limits: tuple[int, int, int] = (UNLIMITED,) * 3, turn: int = 0) -> Pace:
    """A pace whose totals are dirty."""
    return Pace(torch.tensor(limits, device=device), torch.tensor([turn], device=device),
                torch.full((TURNS, TOTALS), DIRT, dtype=torch.int32, pin_memory=device == 'cuda'))


def dirty(kind: type[AnyRows], sequences: int, length: int, capacity: int, device: str) -> AnyRows:
    """Buffers that a longer step has left behind, each followed by memory that is not theirs."""
    rows = kind.empty(sequences, length, capacity, device)
    for f in fields(rows):
        shape = getattr(rows, f.name).shape
        whole = torch.full((shape.numel() + GUARD,), DIRT, dtype=torch.int64, device=device)
        setattr(rows, f.name, whole[:shape.numel()].view(shape))
    return rows


def assert_untouched(rows: Rows) -> None:
    """Nothing was written behind the buffers of `dirty`."""
    for f in fields(rows):
        tensor = getattr(rows, f.name)
        assert torch.as_strided(tensor, (GUARD,), (1,), tensor.numel()).eq(DIRT).all(), f.name


def assert_same(actual: Rows, expected: Rows, limit: int = UNLIMITED, sampled_limit: int = UNLIMITED) -> None:
    """All fields bit for bit, as far as the step's limits reach."""
    for f in fields(expected):
        a, b = getattr(actual, f.name), getattr(expected, f.name)
        end = limit if f.name in ROWS else sampled_limit if f.name in SAMPLED else UNLIMITED
        assert a.dtype == b.dtype and a.shape == b.shape and a[:end].equal(b[:end]), (f.name, a, b)


def assert_told(actual: Pace, expected: Pace) -> None:
    """The same totals, when the device is done."""
    if actual.limits.is_cuda:
        torch.cuda.synchronize()
    assert actual.totals.equal(expected.totals), (actual.totals, expected.totals)
    assert actual.turn.equal(expected.turn) and actual.limits.equal(expected.limits)
