"""Selection: the kept set against exact arithmetic, and what must hold for every kept set."""
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdeploy_focus.kernels import reference
from torch import Tensor

from .. import oracle
from .select_cases import Batch, batches, examples, make_batch

CASES = settings(max_examples=examples(20_000), deadline=None, derandomize=True)


def select(batch: Batch, paper_rules: bool = True) -> Tensor:
    return reference.select(batch.delta, batch.positions, batch.budgets, batch.progress, paper_rules)


@CASES
@given(batches())
def test_kept_set_is_the_oracles(cases):
    """20,000 sequences, with and without the paper's rules.

    Red when: the deviation is a sample's, the threshold is strict, the budget is off by one, a tie goes to the larger
    position, the neighbour rule hops twice or looks at neighbours in the list, placeholders start at `progress`.
    """
    for batch in cases:
        for paper_rules in (True, False):
            kept = select(batch, paper_rules).tolist()
            for row, (delta, positions, allowed, progress) in zip(kept, batch.sequences(), strict=True):
                expected = oracle.select(delta, positions, allowed, progress, paper_rules)
                assert row[:len(positions)] == expected, (delta, positions, allowed, progress, paper_rules)
                assert not any(row[len(positions):])


@CASES
@given(batches())
def test_every_kept_set_obeys_the_rules(cases):
    """Red when: fewer than the budget stay, a token that is not masked is kept, the left neighbour of a token that
    ranks within the budget is missing, or a later layer would attend to a KV that was never computed."""
    for batch in cases:
        kept = select(batch)
        valid = batch.positions >= 0
        masked = valid.sum(1)
        number = kept.sum(1)
        assert not (kept & ~valid).any()
        assert (number >= batch.budgets).all() and (number <= masked).all()
        assert ((number > 0) == (masked > 0)).all()
        assert kept[masked <= batch.budgets].equal(valid[masked <= batch.budgets])
        rightmost = batch.positions.masked_fill(~kept, -1).amax(1, keepdim=True)
        placeholder = valid & (batch.positions < rightmost) & (batch.positions > batch.progress[:, None])
        assert not (placeholder & ~kept).any()
        # the budget's best tokens, by a stable sort instead of the kernel's pairwise count
        order = batch.delta.masked_fill(~valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        best = torch.zeros_like(kept).scatter(1, order, torch.arange(kept.size(1)).expand_as(order)
                                              < batch.budgets[:, None]) & valid
        adjacent = batch.positions[:, 1:] == batch.positions[:, :-1] + 1
        left = torch.zeros_like(kept)
        left[:, :-1] = best[:, 1:] & adjacent
        assert not ((best | left) & ~kept).any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(), st.randoms())
def test_company_does_not_matter(cases, random):
    """Red when: anything of one sequence leaks into another, such as a maximum or a rank over the whole batch."""
    for batch in cases:
        order = list(range(len(batch.budgets)))
        random.shuffle(order)
        kept = select(batch)
        assert select(batch[order]).equal(kept[order])
        for s in range(len(order)):
            assert select(batch[s:s + 1]).equal(kept[s:s + 1])


def test_equal_deltas_keep_everything():
    """Red when: the threshold is strict, or the mean of equal numbers rounds above them."""
    for length in (4, 16, 32, 64):
        for value in (0.0, 0.1, -3.3, 1e-30, 31.999998):
            positions = torch.arange(length)[None]
            kept = reference.select(torch.full((1, length), value), positions, torch.tensor([1]), torch.tensor([-1]))
            assert kept.all(), (length, value)


def test_ties_go_to_the_smaller_position():
    """Red when: the order of equal deltas depends on the sort of the library."""
    delta = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 0.0, 2.0, 2.0]])
    positions = torch.tensor([[0, 2, 4, 5, 7, 9, 11, 13]])
    kept = reference.select(delta, positions, torch.tensor([3]), torch.tensor([15]), paper_rules=False)
    assert positions[kept].tolist() == [2, 4, 7]


def test_numbers_that_are_not_numbers_never_empty_a_sequence():
    """Red when: NaN deltas, from logits or weights gone wrong, leave a sequence without rows or disturb another."""
    batch = make_batch(5, 17, 16)
    poisoned = Batch(batch.delta.clone(), batch.positions, batch.budgets, batch.progress)
    poisoned.delta[::2] = float('nan')
    for paper_rules in (True, False):
        kept, clean = select(poisoned, paper_rules), select(batch, paper_rules)
        assert (kept.sum(1) >= batch.budgets).all()
        assert kept[1::2].equal(clean[1::2])
