"""Selection on the rows of a view: rankings, fixed budgets, sequential unmasking."""
import pytest
import torch
from torch import Tensor

from lmdeploy_focus.stages import budget, select
from lmdeploy_focus.stages.state import FocusState
from lmdeploy_focus.stages.view import MASKED, FocusView, entering_view

from .. import oracle


def make(sequences: int, length: int, seed: int) -> tuple[FocusView, Tensor, Tensor]:
    """A view whose sequences have 0, 1, L or other numbers of masked tokens, importance and progress."""
    random = torch.Generator().manual_seed(seed)
    share = torch.rand(sequences, 1, generator=random)
    mask = (torch.rand(sequences, length, generator=random) < share).to(torch.uint8)
    mask[:1] = MASKED
    mask[1:2] = 1
    entering = (mask == MASKED) | (torch.rand(sequences, length, generator=random) < .5)
    entering[:, 0] = True
    history = torch.randint(0, 500, (sequences,), generator=random)
    pages = torch.arange(sequences * 40).view(sequences, 40)
    view = entering_view(torch.zeros_like(mask, dtype=torch.int64), entering, mask, history, pages, 16, history, 600)
    return (view, torch.randn(sequences, length, generator=random),
            torch.randint(-1, length, (sequences,), generator=random))


def kept_positions(view: FocusView, keep: Tensor) -> list[list[int]]:
    """Block positions of the masked rows that stay, a list a sequence."""
    return [view.position[keep & view.masked & (view.sequence == s)].tolist() for s in range(view.num_sequences)]


def run(view: FocusView, delta: Tensor, progress: Tensor, allowed: int, ranking: str, fixed: bool = True,
        sequential: int = 0) -> Tensor:
    rows, positions = view.candidates()
    budgets = (rows >= 0).sum(1).clamp_max(allowed)
    return select.keep_rows(delta, rows, positions, budgets, view, progress, ranking, fixed, sequential)


SHAPES = pytest.mark.parametrize('sequences,length', [(1, 4), (3, 16), (17, 32), (17, 64)])


@SHAPES
@pytest.mark.parametrize('ranking,fixed', [('top', False), ('top', True), ('bottom', False), ('bottom', True)])
def test_rows_that_stay(sequences, length, ranking, fixed):
    """Red when: a decoded row is evicted, 'bottom' ranks like 'top', a fixed budget or an ablation still follows the
    deviation threshold and the left-neighbour rule, or a decision lands on another sequence's row."""
    for seed in range(20):
        view, delta, progress = make(sequences, length, seed)
        keep = run(view, delta, progress, 3, ranking, fixed)
        assert keep[~view.masked].all()
        _, positions = view.candidates()
        sign = 1 if ranking == 'top' else -1
        for s, kept in enumerate(kept_positions(view, keep)):
            own = positions[s][positions[s] >= 0].tolist()
            scores = [sign * value for value in delta[s, :len(own)].tolist()]
            stays = oracle.select(scores, own, min(3, len(own)), int(progress[s]), ranking == 'top' and not fixed)
            assert kept == [p for p, stay in zip(own, stays, strict=True) if stay]


@SHAPES
def test_random_is_a_property_of_the_place(sequences, length):
    """Red when: the random ranking depends on the batch, on the importance or on a global generator; or when it is the
    same everywhere."""
    view, delta, progress = make(sequences, length, 3)
    progress.fill_(length)  # without placeholders, which would hide the ranking
    together = kept_positions(view, run(view, delta, progress, 2, 'random'))
    assert together == kept_positions(view, run(view, torch.randn_like(delta), progress, 2, 'random'))
    for s in range(sequences):
        own = view.sequence == s
        mask = torch.ones(1, length, dtype=torch.uint8)
        mask[0, view.position[own & view.masked]] = MASKED
        entering = torch.zeros(1, length, dtype=torch.bool)
        entering[0, view.position[own]] = True
        history, pages = view.history[s:s + 1], view.page_table[s:s + 1]
        alone = entering_view(torch.zeros(1, length, dtype=torch.int64), entering, mask, history, pages, 16, history,
                              600)
        assert kept_positions(alone, run(alone, delta[:1], progress[:1], 2, 'random')) == [together[s]]


def test_random_keeps_every_place_alike():
    """20,000 blocks of 8 masked tokens with K=2: each position stays in a quarter of them, within six deviations.

    Red when: the hash favours a position, or every block of a text gets the same set.
    """
    length, blocks = 8, 20_000
    shape = (blocks, length)
    history = torch.arange(blocks) * length
    view = entering_view(torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool),
                         torch.zeros(shape, dtype=torch.uint8), history, torch.zeros(blocks, 1, dtype=torch.int64),
                         blocks * length, history, blocks * length)
    keep = run(view, torch.zeros(shape), torch.full((blocks,), length), 2, 'random').view(shape)
    assert keep.sum(1).eq(2).all()
    share = keep.float().mean(0)
    assert (share - .25).abs().max() < 6 * (.25 * .75 / blocks)**.5


@SHAPES
def test_sequential_positions_always_stay(sequences, length):
    """Red when: the positions that sequential unmasking decides next are evicted, or replace the selection."""
    for seed in range(10):
        view, delta, progress = make(sequences, length, seed)
        plain = kept_positions(view, run(view, delta, progress, 1, 'top', fixed=False))
        _, positions = view.candidates()
        for s, kept in enumerate(kept_positions(view, run(view, delta, progress, 1, 'top', fixed=False, sequential=3))):
            first = positions[s][positions[s] >= 0][:3].tolist()
            assert kept == sorted({*plain[s], *first})


def test_fixed_budget():
    """Red when: focus_keep is taken for alpha's budget, or allows more than is masked."""
    state = FocusState.fresh(torch.full((4,), -1))
    state.decoded, state.steps = torch.full((4,), 9), torch.full((4,), 3)
    masked = torch.tensor([0, 1, 4, 32])
    assert budget.allot(masked, state, 1.5, 4).tolist() == [0, 1, 4, 4]
    assert budget.allot(masked, state, 1.5, None).tolist() == [0, 1, 4, 5]
