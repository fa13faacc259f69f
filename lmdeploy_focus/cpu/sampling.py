"""Seeded sampling: LMDeploy's plain torch operator draws from the process's generator and ignores a request's seed."""
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl
from torch import Tensor

# SplitMix64's increment and multipliers, as signed 64-bit integers: products wrap as they do for unsigned ones
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def uniform(seeds: Tensor, offsets: Tensor) -> Tensor:
    """Numbers in [0, 1) that are a function of seed and offset alone, [R] int64 each -> [R] float64."""
    value = (seeds * _FACTORS[0]) ^ ((offsets + 1) * _GOLDEN)
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        value = (value ^ _shifted(value, shift)) * factor
    value = value ^ _shifted(value, 31)
    return _shifted(value, 11).double() * 2.0**-53


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


class CpuMultinomialSamplingImpl(MultinomialSamplingImpl):
    """One token a row, by inverting the cumulative distribution at the row's own number."""

    def forward(self, scores: Tensor, seeds: Tensor, offsets: Tensor, indices: Tensor | None = None) -> Tensor:
        """Sample.

        Args:
            scores: [R, K] probabilities.
            seeds, offsets: [R] int64, a request's seed and the row's place in its random stream.
            indices: [R, K] token of each probability; the column itself where None.

        Returns:
            [R] int64 tokens; never one of probability 0.
        """
        cumulative = scores.double().cumsum(-1)
        target = uniform(seeds.long(), offsets.long())[:, None] * cumulative[:, -1:]
        column = (cumulative <= target).sum(-1, keepdim=True).clamp_max(scores.size(-1) - 1)
        return (column if indices is None else indices.gather(-1, column)).flatten()
