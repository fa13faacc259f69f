"""Seeded sampling on a CPU."""
import pytest
import torch

from lmdeploy_focus.cpu.sampling import CpuMultinomialSamplingImpl, uniform

SAMPLE = CpuMultinomialSamplingImpl().forward


def test_numbers_are_uniform_and_independent():
    """Chi-square over 64 bins along seeds and offsets. Red when a stream repeats, is biased, or follows another."""
    count = torch.arange(64_000)
    for seeds, offsets in ((count, torch.full_like(count, 7)), (torch.full_like(count, 7), count),
                           (count % 251, count // 251)):
        numbers = uniform(seeds, offsets)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert len(set(numbers.tolist())) == len(numbers)
        observed = torch.histc(numbers, 64, 0, 1)
        # 63 degrees of freedom: 120 is passed by chance less than once in 100,000 draws; the numbers are fixed
        assert float(((observed - 1000)**2 / 1000).sum()) < 120
        assert abs(float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])) < 0.02


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_tokens_follow_the_probabilities(dtype):
    """Red when the distribution is inverted wrongly, or a token of probability 0 is drawn."""
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125], dtype=dtype)
    rows = 20_000
    tokens = SAMPLE(probabilities.expand(rows, -1), torch.full((rows, ), 3), torch.arange(rows),
                    torch.tensor([10, 11, 12, 13, 14]).expand(rows, -1))
    share = torch.bincount(tokens, minlength=15)[10:] / rows
    torch.testing.assert_close(share, probabilities.float(), atol=0.015, rtol=0)
    assert share[2] == 0


def test_a_row_depends_on_its_own_seed_only():
    """Red when company changes what a seeded row draws."""
    scores = torch.rand(17, 50).softmax(-1)
    seeds, offsets = torch.arange(17), torch.arange(17) * 3
    together = SAMPLE(scores, seeds, offsets)
    alone = torch.cat([SAMPLE(scores[i:i + 1], seeds[i:i + 1], offsets[i:i + 1]) for i in range(17)])
    assert together.tolist() == alone.tolist()
