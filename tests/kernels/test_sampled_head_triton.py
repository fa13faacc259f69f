"""The Triton sampled head beside its twin, and the twin beside LMDeploy's own filters and exact distributions."""

import pytest
import torch
from lmdeploy.pytorch.engine import logits_process as stock
from lmdeploy_focus.kernels import reference_greedy_head, reference_sampled_head
from torch import Tensor

from . import sampled_head_checks as checks
from .interpreter import run_interpreted

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
FILTERS = pytest.mark.parametrize('setting', [(.7, 20, 1., 0., 5), (1., 64, .8, 0., 6), (1.5, 40, 1., .2, 7),
                                              (.9, 50, .9, .05, 8)], ids=str)
DRAWS = 20000


def test_interpreter():
    """Red when: a tie goes to a later token, a chunk with one of the 64 best is passed over, a filter keeps one
    candidate too many or too few, the mask token is drawn or counts, a row beyond the count is read or left unmarked,
    strides are taken for granted, a row's draw depends on its company, or Triton's Philox and the twin's part."""
    run_interpreted(checks)


def stock_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """LMDeploy's probabilities of sorted [R, V] logits, by its own filters and in their order."""
    rows = logits.size(0)
    scores = stock._process_temperature_(logits.double(), torch.full((rows,), temperature))
    scores = stock._filter_topk_sorted_(scores, torch.full((rows,), top_k))
    scores = stock._filter_topp_sorted_(scores, torch.full((rows,), top_p).double())
    return stock._filter_minp_sorted_(scores, torch.full((rows,), min_p).double()).softmax(1)


def draws(logits: Tensor, mask_token: int, setting: tuple[float, int, float, float, int], head=reference_sampled_head):
    """One draw from each of [R, V] rows, all at places of their own in one sequence's random stream."""
    place = torch.arange(logits.size(0), device=logits.device)
    arguments = checks.settings(str(logits.device), [setting]) | {'sequence': torch.zeros_like(place),
                                                                  'position': place}
    return arguments, head.sampled_head(logits, mask_token, checks.all_rows(logits), **arguments)


@FILTERS
def test_twin_draws_as_stock(setting):
    """Red when: a filter, its order or its normalisation is not LMDeploy's, or a number selects another candidate."""
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(1)) * 3
    arguments, (tokens, scores) = draws(logits, 7, setting)
    logits[:, 7] = -torch.inf
    ordered, indices = logits.sort(1, descending=True)
    ends = stock_distribution(ordered, *setting[:4]).cumsum(1)
    numbers = reference_sampled_head.uniform(arguments['seeds'].expand(500), arguments['random_offset']
                                             * checks.LENGTH + arguments['position'])[:, None].double()
    # lmdeploy.pytorch.kernels.cuda.multinomial_sampling: starts < number <= ends
    column = (ends < numbers).sum(1, keepdim=True)
    assert tokens.equal(indices.gather(1, column)[:, 0])
    exact = (logits.double() / torch.tensor(setting[0]).double()).softmax(1)
    torch.testing.assert_close(scores, exact.gather(1, tokens[:, None])[:, 0].float(), rtol=1e-5, atol=0)


def assert_distribution(tokens: Tensor, logits: Tensor, setting: tuple[float, int, float, float, int]) -> None:
    """Chi-square of the draws from one row of logits against its filtered distribution."""
    ordered, indices = logits[None].sort(1, descending=True)
    expected = torch.zeros(logits.numel(), dtype=torch.float64)
    expected[indices[0]] = stock_distribution(ordered, *setting[:4])[0] * tokens.numel()
    seen = tokens.bincount(minlength=logits.numel()).double()
    assert seen[expected == 0].sum() == 0
    likely = expected > 5
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** .5, (statistic, freedom)


@FILTERS
def test_twin_distribution(setting):
    """Red when: draws along a stream, or of the same place of many seeds, do not follow the filtered distribution."""
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2)) * 2
    logits[3] = -torch.inf
    tokens = draws(logits.expand(DRAWS, -1), 3, setting)[1][0]
    assert_distribution(tokens, logits, setting)
    many = checks.settings('cpu', [setting]) | {'seeds': torch.arange(DRAWS)}
    many |= {name: many[name].expand(DRAWS) for name in ('temperature', 'top_k', 'top_p', 'min_p', 'random_offset')}
    tokens = reference_sampled_head.sampled_head(logits.expand(DRAWS, -1), 3, torch.tensor([DRAWS]),
                                                 torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64), **many)[0]
    assert_distribution(tokens, logits, setting)


@pytest.mark.parametrize('vocabulary', [1, 3, 63, 64, 65, 128, 20001])
def test_twin_candidates(vocabulary):
    """Red when: candidates are not the first columns of a stable sort of the whole row."""
    values = (torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3).round()
    values[:, vocabulary // 2] = torch.inf
    values[1::2, vocabulary // 3:] = -torch.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    found, tokens = reference_sampled_head._candidates(values)
    assert tokens.equal(expected.indices[:, :64]) and found.equal(expected.values[:, :64])


@pytest.mark.parametrize('shape', checks.SMALL, ids=str)
def test_twin_greedy(shape):
    """Red when: a greedy row among sampled ones has not the bits of the greedy head's twin."""
    logits, mask_token, place = checks.make(shape, torch.float32, 'cpu')
    tokens, scores = reference_sampled_head.sampled_head(logits, mask_token, checks.all_rows(logits), **place,
                                                         **checks.settings('cpu'))
    expected = reference_greedy_head.greedy_head(logits, mask_token)
    greedy = place['sequence'] == 0
    assert tokens[greedy].equal(expected[0][greedy])
    assert scores[greedy].nan_to_num(-1).equal(expected[1][greedy].nan_to_num(-1))


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_twin(shape, dtype):
    """Red when: as in the interpreter, or weights are added up in less than float64."""
    checks.check_twin(shape, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_company(shape, dtype):
    """Red when: a row's bits depend on the number of rows or on where its sequence stands."""
    checks.check_company(shape, dtype, 'cuda')


@pytest.mark.gpu
@DTYPES
@SHAPES
def test_greedy(shape, dtype):
    """Red when: a greedy row's token or confidence changes when another request samples."""
    checks.check_greedy(shape, dtype, 'cuda')


@pytest.mark.gpu
@pytest.mark.parametrize('check', [checks.check_uniform, checks.check_slots, checks.check_ties, checks.check_bounds,
                                   checks.check_extremes, checks.check_refusals], ids=lambda check: check.__name__)
def test_cases(check):
    """Red when: Philox, ties, bounds of the filters, NaN, infinities or refusals are not as in the interpreter."""
    check('cuda')


@pytest.mark.gpu
@FILTERS
def test_distribution(setting):
    """Red when: the kernel's draws do not follow the filtered distribution, or are not the CPU's."""
    from lmdeploy_focus.kernels import sampled_head
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2)) * 2
    logits[3] = -torch.inf
    tokens = draws(logits.expand(DRAWS, -1).contiguous().cuda(), 3, setting, sampled_head)[1][0].cpu()
    assert tokens.equal(draws(logits.expand(DRAWS, -1), 3, setting)[1][0])
    assert_distribution(tokens, logits, setting)


@pytest.mark.gpu
def test_graph():
    """Red when: a captured head does not follow the count and the random offset that a replay finds."""
    logits, mask_token, place = checks.make((40, 151936), torch.bfloat16, 'cuda')
    arguments = checks.settings('cuda') | place
    count = checks.all_rows(logits)
    checks.sampled_head(logits, mask_token, count, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = checks.sampled_head(logits, mask_token, count, **arguments)
    for rows in (40, 13, 0, 25):
        count.fill_(rows)
        arguments['random_offset'] += 1
        graph.replay()
        for found, expected in zip(captured, checks.sampled_head(logits, mask_token, count, **arguments), strict=True):
            assert found.equal(expected)
