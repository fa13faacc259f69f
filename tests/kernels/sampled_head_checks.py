"""What must hold for the Triton sampled head, interpreted or compiled; run as a program it checks the small shapes."""
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from lmdeploy_focus.kernels import reference_sampled_head as reference
from lmdeploy_focus.kernels.greedy_head import greedy_head
from lmdeploy_focus.kernels.sampled_head import _slots, sampled_head
from torch import Tensor

SMALL = [(3, 1), (4, 3), (2, 127), (2, 128), (5, 129), (5, 4097), (3, 20001)]  # R, V
LARGE = [(1, 151936), (17, 151936), (300, 151936), (5, 200000), (2500, 32000), (33, 126464)]
INF, NAN = float('inf'), float('nan')
LENGTH = 8
# temperature, top_k, top_p, min_p, seed: greedy, filtered by each and by none, seeds of more than 32 bits
SETTINGS = [(1., 1, 1., 0., 3), (.7, 64, .9, 0., 2**40 + 3), (1.3, 5, 1., .1, -7), (4., 64, 1., 0., 2**32 - 1),
            (.8, 40, .95, .02, 3)]


def settings(device: str, chosen: list[tuple[float, int, float, float, int]] = SETTINGS) -> dict[str, Any]:
    """Arguments of sequences with these parameters; the random offset is a column of a table."""
    temperature, top_k, top_p, min_p, seeds = (torch.tensor(column, device=device)
                                               for column in zip(*chosen, strict=True))
    table = torch.full((len(chosen), 5), -1, device=device)
    table[:, 3] = torch.arange(len(chosen), device=device) * 1000003 + 2
    return {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'min_p': min_p, 'seeds': seeds,
            'random_offset': table[:, 3], 'length': LENGTH}


def make(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Strided logits, of which about half repeat one another, a mask token that would win every row, and its place."""
    rows, vocabulary = shape
    random = torch.Generator().manual_seed(rows + vocabulary)
    wide = torch.randn(rows, vocabulary + 3, generator=random) * 4
    wide[::2] = wide[::2].round()
    mask_token = vocabulary // 3
    wide[:, mask_token] = 90.
    index = torch.arange(rows, device=device)
    place = {'sequence': index % len(SETTINGS), 'position': index * 5 % LENGTH}
    return wide.to(dtype).to(device)[:, :vocabulary], mask_token, place


def all_rows(logits: Tensor) -> Tensor:
    """A count that leaves out no row."""
    return torch.tensor([logits.size(0)], device=logits.device)


def assert_twin(logits: Tensor, mask_token: int, count: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The twin's tokens, and its confidence but for the last bits."""
    before = logits.clone()
    tokens, scores = sampled_head(logits, mask_token, count, **arguments)
    expected_tokens, expected_scores = reference.sampled_head(logits, mask_token, count, **arguments)
    assert tokens.dtype == torch.int64 and tokens.equal(expected_tokens), (tokens, expected_tokens)
    torch.testing.assert_close(scores, expected_scores, rtol=5e-5, atol=1e-9, equal_nan=True)
    assert logits.equal(before) or logits.isnan().any()
    return tokens, scores


def check_twin(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """All rows, none, and some of them, whose number only the device knows."""
    logits, mask_token, place = make(shape, dtype, device)
    arguments = settings(device) | place
    assert_twin(logits, mask_token, all_rows(logits), arguments)
    for count, kind in ((shape[0] // 2, torch.int32), (0, torch.int64)):
        assert_twin(logits, mask_token, torch.tensor([count], dtype=kind, device=device), arguments)


def check_company(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """A row has the same bits alone as in company, wherever its sequence stands."""
    logits, mask_token, place = make(shape, dtype, device)
    arguments = settings(device)
    tokens, scores = sampled_head(logits, mask_token, all_rows(logits), **place, **arguments)
    for row in range(0, shape[0], -(-shape[0] // 4)):
        own = int(place['sequence'][row])
        alone = {name: value[own:own + 1] if isinstance(value, Tensor) else value for name, value in arguments.items()}
        result = sampled_head(logits[row:row + 1], mask_token, all_rows(logits[:1]),
                              torch.zeros(1, dtype=torch.int64, device=device), place['position'][row:row + 1], **alone)
        assert result[0].equal(tokens[row:row + 1])
        # where the mask token is the whole vocabulary there is no probability
        assert result[1].nan_to_num(-1).equal(scores[row:row + 1].nan_to_num(-1))


def check_greedy(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """A greedy row among sampled ones has the greedy head's token, and its confidence but for the order of a sum."""
    logits, mask_token, place = make(shape, dtype, device)
    tokens, scores = sampled_head(logits, mask_token, all_rows(logits), **place, **settings(device))
    expected_tokens, expected_scores = greedy_head(logits, mask_token)
    greedy = place['sequence'] == 0
    assert tokens[greedy].equal(expected_tokens[greedy])
    torch.testing.assert_close(scores[greedy].nan_to_num(-1), expected_scores[greedy].nan_to_num(-1), rtol=1e-6,
                               atol=0)


def check_ties(device: str) -> None:
    """Of equal logits the first 64 are candidates, over chunks, parts and signs of zero, and all are as probable."""
    vocabulary, mask_token, rows = 9000, 300, 8
    logits = torch.full((rows, vocabulary), -1., device=device)
    logits[:, ::100] = 0.
    logits[:, 500:700:100] = -0.
    logits[rows // 2:] = 2.
    first = [token for token in range(0, vocabulary, 100) if token != mask_token][:64]
    second = [token for token in range(65) if token != mask_token][:64]
    one = settings(device, [(1., 64, 1., 0., 11)])
    sequence, position = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    tokens, _ = assert_twin(logits, mask_token, all_rows(logits), one | {'sequence': sequence, 'position': position})
    numbers = reference.uniform(one['seeds'].expand(rows), one['random_offset'] * LENGTH + position)
    columns = (numbers.double() * 64).ceil().long().sub(1).clamp_min(0).tolist()
    assert tokens.tolist() == [(first if row < rows // 2 else second)[column] for row, column in enumerate(columns)]


def check_bounds(device: str) -> None:
    """Four equally probable tokens, of which a filter at its bound keeps three, all, or two."""
    rows, mask_token = 15, 1
    logits = torch.full((rows, 130), -INF, device=device)
    logits[:, [0, 1, 5, 127, 129]] = 3.
    index = torch.arange(rows, device=device)
    chosen = [(1., 64, .5, 0., 1), (.5, 64, 1., 1., 2), (1., 2, 1., 0., 3)]
    arguments = settings(device, chosen) | {'sequence': index % 3, 'position': index // 3}
    tokens, _ = assert_twin(logits, mask_token, all_rows(logits), arguments)
    offsets = arguments['random_offset'][index % 3] * LENGTH + index // 3
    numbers = reference.uniform(arguments['seeds'][index % 3], offsets).double()
    kept = torch.tensor([3, 4, 2], device=device)[index % 3]
    assert tokens.equal(torch.tensor([0, 5, 127, 129], device=device)[(numbers * kept).ceil().long() - 1])


@triton.jit
def _slots_kernel(values, taken, slot, count, K: tl.constexpr, SPARE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    which, place = _slots(tl.load(values + at), at < count, K, SPARE)
    tl.store(taken + at, which)
    tl.store(slot + at, place)


def check_slots(device: str) -> None:
    """The first K of a stable sort, in their order; all that are valid where there are not more than K."""
    random = torch.Generator().manual_seed(0)
    fine = 1 + torch.randperm(256, generator=random) * 2.**-23  # neighbours in float32
    coarse = torch.randn(256, generator=random)
    for values, spare in ((fine, 0), (-fine, 0), (fine.round(), 0), (coarse.round(), 13), (-fine.bfloat16(), 16),
                          (coarse.bfloat16(), 16), (coarse.half(), 13), (fine * -INF, 0)):
        for count in (256, 65, 64, 30):
            on_device = values.float().to(device)
            taken = torch.empty(256, dtype=torch.bool, device=device)
            slot = torch.empty(256, dtype=torch.int32, device=device)
            _slots_kernel[(1,)](on_device, taken, slot, count, K=64, SPARE=spare, BLOCK=256)
            best = values[:count].float().sort(descending=True, stable=True).indices[:64].sort().values
            assert taken.nonzero()[:, 0].cpu().equal(best), (values, count)
            assert slot[taken].tolist() == list(range(min(64, count)))


def check_extremes(device: str) -> None:
    """Banned parts, infinite logits, NaN, logits whose exponential overflows, fewer finite ones than candidates."""
    logits = torch.full((9, 9000), -INF, device=device)
    logits[0, [7000, 8999]] = 3.
    logits[1, 8999] = -80.
    logits[2, :] = 500.
    logits[3, [8000, 8500]] = INF
    logits[4, [1, 6000]] = torch.tensor([5., NAN], device=device)
    logits[6, :] = torch.linspace(-1e30, 1e30, 9000, device=device)
    logits[7, [5, 8000]] = torch.tensor([NAN, INF], device=device)
    logits[8, :] = torch.linspace(-1e-38, 1e-40, 9000, device=device)
    index = torch.arange(9, device=device)
    for first in (0, 3):
        arguments = settings(device) | {'sequence': (index + first) % len(SETTINGS), 'position': index % LENGTH}
        tokens, scores = assert_twin(logits, 8001, all_rows(logits), arguments)
        assert tokens[0] in (7000, 8999) and tokens[[1, 3, 4, 5, 6, 7]].tolist() == [8999, 8000, 6000, 0, 8999, 5]
        assert scores[1] == 1 and scores[[3, 4, 5, 7]].isnan().all()
        assert tokens[2] < 64


def check_refusals(device: str) -> None:
    """What the kernels cannot take raises."""
    logits, _, place = make((4, 10), torch.float32, device)
    good: dict[str, Any] = {'logits': logits, 'mask_token': 1, 'count': all_rows(logits)} | place | settings(device)
    for name, value in (('mask_token', 10), ('mask_token', -1), ('logits', logits.long()), ('logits', logits.T),
                        ('logits', logits.double()), ('logits', logits[0]), ('count', good['count'].float()),
                        ('count', torch.zeros(2, dtype=torch.int64, device=device)),
                        ('sequence', place['sequence'].int()), ('position', place['position'][:3]),
                        ('temperature', good['temperature'].double()), ('top_k', good['top_k'].int()),
                        ('top_p', good['top_p'][:2]), ('seeds', good['seeds'][:, None]),
                        ('random_offset', good['random_offset'].int())):
        with pytest.raises(ValueError, match='takes|from'):
            sampled_head(**good | {name: value})


@triton.jit
def _rand_kernel(seeds, offsets, out):
    at = tl.program_id(0)
    tl.store(out + at, tl.rand(tl.load(seeds + at), tl.load(offsets + at).to(tl.int32)))


def check_uniform(device: str) -> None:
    """The twin's numbers are Triton's, to the last bit."""
    random = torch.Generator().manual_seed(0)
    seeds = torch.randint(-2**63, 2**63 - 1, (60,), generator=random).to(device)
    seeds[:4] = torch.tensor([0, 1, 2**32 - 1, -1])
    offsets = torch.randint(0, 2**34, (60,), generator=random).to(device)
    offsets[1:6] = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32])
    numbers = torch.empty(60, device=device)
    _rand_kernel[(60,)](seeds, offsets, numbers)
    assert reference.uniform(seeds, offsets).equal(numbers)


def main() -> None:
    torch.set_num_threads(1)
    check_uniform('cpu')
    for shape in SMALL:
        check_twin(shape, torch.float32, 'cpu')
    check_twin((1, 151936), torch.bfloat16, 'cpu')
    for dtype in (torch.bfloat16, torch.float16):
        check_twin((5, 4097), dtype, 'cpu')
    check_company((5, 4097), torch.float32, 'cpu')
    for shape in ((3, 1), (6, 5000)):
        check_greedy(shape, torch.float32, 'cpu')
    check_slots('cpu')
    check_ties('cpu')
    check_bounds('cpu')
    check_extremes('cpu')
    check_refusals('cpu')
    logits, mask_token, place = make((0, 10), torch.float32, 'cpu')
    assert sampled_head(logits, mask_token, all_rows(logits), **place, **settings('cpu'))[0].shape == (0,)


if __name__ == '__main__':
    main()
