"""What must hold for the Triton greedy head, interpreted or compiled; run as a program it checks the small shapes."""
import pytest
import torch
from lmdeploy_focus.kernels import reference_greedy_head as reference
from lmdeploy_focus.kernels.greedy_head import greedy_head
from torch import Tensor

SMALL = [(1, 2), (3, 5), (4, 4096), (3, 4097), (2, 20001)]  # R, V
LARGE = [(1, 151936), (17, 151936), (300, 151936), (5, 200000), (2500, 32000), (33, 126464)]
INF, NAN = float('inf'), float('nan')


def make(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, int]:
    """Strided logits, of which about a quarter repeat one another, and a mask token that would win every row."""
    rows, vocabulary = shape
    random = torch.Generator().manual_seed(rows + vocabulary)
    wide = torch.randn(rows, vocabulary + 3, generator=random) * 6
    wide[::2] = wide[::2].round()
    mask_token = vocabulary // 3
    wide[:, mask_token] = 90.
    return wide.to(dtype).to(device)[:, :vocabulary], mask_token


def assert_twin(logits: Tensor, mask_token: int, count: Tensor | None = None) -> None:
    """The twin's tokens, and its confidence but for the last bits."""
    before = logits.clone()
    tokens, scores = greedy_head(logits, mask_token, count)
    expected_tokens, expected_scores = reference.greedy_head(logits, mask_token, count)
    assert tokens.dtype == torch.int64 and tokens.equal(expected_tokens), (tokens, expected_tokens)
    torch.testing.assert_close(scores, expected_scores, rtol=2e-5, atol=0, equal_nan=True)
    assert logits.equal(before) or logits.isnan().any()


def check_twin(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """All rows, none, and some of them, whose number only the device knows."""
    logits, mask_token = make(shape, dtype, device)
    assert_twin(logits, mask_token)
    for count in {0, shape[0] // 2, shape[0]}:
        for kind in (torch.int32, torch.int64):
            assert_twin(logits, mask_token, torch.tensor([count], dtype=kind, device=device))


def check_company(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """A row has the same bits alone as in company."""
    logits, mask_token = make(shape, dtype, device)
    tokens, scores = greedy_head(logits, mask_token)
    for row in range(0, shape[0], -(-shape[0] // 5)):
        alone = greedy_head(logits[row:row + 1], mask_token)
        assert alone[0].equal(tokens[row:row + 1]) and alone[1].equal(scores[row:row + 1])


def check_extremes(device: str) -> None:
    """Ties between parts, banned parts, infinite logits, NaN, and logits whose exponential overflows."""
    logits = torch.full((7, 20000), -INF, device=device)
    logits[0, [7000, 9000, 19000]] = 3.
    logits[1, 19999] = -80.
    logits[2, :] = 500.
    logits[3, [8000, 9000]] = INF
    logits[4, [1, 12000]] = torch.tensor([5., NAN], device=device)
    logits[6, :] = torch.linspace(-1e30, 1e30, 20000, device=device)
    assert_twin(logits, 8001)
    tokens, scores = greedy_head(logits, 8001)
    assert tokens.tolist()[:5] == [7000, 19999, 0, 8000, 12000] and tokens[6] == 19999
    assert scores[1] == 1 and scores[3:6].isnan().all()
    logits[2, 0] = 600.
    assert greedy_head(logits, 0)[0][2] == 1  # the mask token does not win


def check_refusals(device: str) -> None:
    """What the kernels cannot take raises."""
    logits = torch.zeros(4, 10, device=device)
    for arguments in ((logits, 10), (logits, -1), (logits.long(), 1), (logits.T, 1), (logits[0], 1),
                      (logits, 1, torch.zeros(2, dtype=torch.int32, device=device)),
                      (logits, 1, torch.zeros(1, device=device))):
        with pytest.raises(ValueError, match='takes|from'):
            greedy_head(*arguments)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, torch.float32, 'cpu')
    for dtype in (torch.bfloat16, torch.float16):
        check_twin(SMALL[3], dtype, 'cpu')
    check_company(SMALL[4], torch.float32, 'cpu')
    check_extremes('cpu')
    check_refusals('cpu')
    assert greedy_head(torch.zeros(0, 10), 1)[0].shape == (0,)


if __name__ == '__main__':
    main()
