"""The published trace: blocks drawn by a seeded process with the means of the paper (arXiv 2601.23278, Table 5).

A block has a pace, gamma distributed around the mean. A step decodes one token and a Poisson number more of what it
may, those of the highest score: a masked token's score falls off exponentially with its place among the masked tokens
and has noise, so that tokens are decoded from left to right with jumps. The same score is the importance delta, from
which the real selection (`simulate`) chooses what is kept. Two numbers are fitted by :func:`fit`: the pace to tokens a
step, the noise to kept rows a decoded token. The paper gives rows alone: a dense block runs L rows a step and L for its
commit, so that R rows a token are R - 1 steps a block. Of a decode with FOCUS, at its lower threshold, it does not give
the steps: they are taken to be more numerous than the dense ones by the factor of the demo model (2.269 / 2.152).
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .simulate import Blocks, simulate
from .traces import MODES, Recording, join

# rows a decoded token in layers 2 and later: dense, with FOCUS. Blocks of 64 have no such line in the paper: about 30
# dense, and with FOCUS the rows at which the published gain of 3.52 has the ratio to the rows saved that blocks of 32
# have (2.32 of 15.02 / 3.12)
ROWS = {('sharegpt', 32): (15.02, 3.12), ('wildchat', 32): (14.83, 3.05), ('math', 32): (7.45, 2.69),
        ('sharegpt', 64): (30.0, 4.1)}
STEPS_WITH_FOCUS = 2.269 / 2.152
WHOLE, PARTIAL = 512, 8
DECAY = 2.5


@dataclass(frozen=True)
class Process:
    """What is drawn: mean tokens that a step decodes beyond the first, and the noise of the scores."""
    extra: float
    noise: float


# what :func:`fit` finds for them
FITTED = {
    ('sharegpt', 32): {'dense': Process(1.7252, 0.1729), 'focus': Process(1.6616, 0.1729)},
    ('wildchat', 32): {'dense': Process(1.7399, 0.0811), 'focus': Process(1.7359, 0.0811)},
    ('math', 32): {'dense': Process(5.9012, 0.2627), 'focus': Process(6.8651, 0.2627)},
    ('sharegpt', 64): {'dense': Process(1.5388, 0.4541), 'focus': Process(1.4267, 0.4541)},
}


def published(workload: str, length: int) -> tuple[dict[str, Recording], dict[str, dict[str, float]]]:
    """Blocks by mode, and the means of the whole ones; the delayed cache decodes by the dense process.

    Raises:
        ValueError: nothing is published for blocks of this length and this workload.
    """
    if (workload, length) not in FITTED:
        known = ', '.join(f'{name} at {size}' for name, size in FITTED)
        raise ValueError(f'--trace published: nothing for {workload} with blocks of {length}; there are {known}')
    recordings, means = {}, {}
    partial = np.repeat(np.arange(1, length), PARTIAL)
    for mode in MODES:
        process = FITTED[workload, length]['focus' if mode == 'focus' else 'dense']
        whole = draw(process, length, mode, np.full(WHOLE, length))
        means[mode] = whole.means()
        recordings[mode] = join([whole, draw(process, length, mode, partial, seed=1)])
    return recordings, means


def tokens_per_step(length: int, rows: float, focus: bool) -> float:
    """Denoising steps of a block by its dense rows a token, as tokens a step."""
    return length / (rows - 1) / (STEPS_WITH_FOCUS if focus else 1)


def draw(process: Process, length: int, mode: str, waiting: np.ndarray, seed: int = 0) -> Recording:
    """Blocks of one mode in which the last `waiting` [B] positions are masked."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    pace = torch.as_tensor(rng.gamma(3.0, process.extra / 3.0, len(waiting)))
    score = torch.zeros((len(waiting), length))

    def rank(state: Blocks) -> Tensor:
        nth = (state.masked.cumsum(1) - 1).float()
        noise = torch.rand(score.shape, generator=generator)
        score.copy_((-nth / DECAY).exp() + process.noise * noise)
        return score

    def decide(state: Blocks, kept: Tensor) -> Tensor:
        if mode != 'focus':
            rank(state)
        count = 1 + torch.poisson(pace, generator=generator)
        order = score.masked_fill(~kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
        place = torch.empty_like(order).scatter(1, order, torch.arange(length).expand_as(order))
        return kept & (place < count[:, None])

    return simulate(waiting, length, mode, rank, decide)


def fit(length: int, rows: tuple[float, float], passes: int = 3) -> dict[str, Process]:
    """The processes whose whole blocks have the published means, by bisection on the same random numbers.

    Tokens a step fit the pace of each; rows with FOCUS fit the noise, which dense decoding shares.
    """
    waiting = np.full(WHOLE, length)

    def bisect(low: float, high: float, goal: float, mean: str, mode: str,
               process: Callable[[float], Process]) -> float:
        for _ in range(9):
            middle = (low + high) / 2
            less = draw(process(middle), length, mode, waiting).means()[mean] < goal
            low, high = (middle, high) if less else (low, middle)
        return round((low + high) / 2, 4)

    def pace(mode: str, noise: float) -> float:
        goal = tokens_per_step(length, rows[0], mode == 'focus')
        return bisect(0, 2 * goal, goal, 'tokens_per_step', mode, lambda extra: Process(extra, noise))

    noise = 0.1
    for _ in range(passes):
        extra = pace('focus', noise)
        noise = bisect(0, 1, rows[1], 'rows_per_token', 'focus', lambda value, extra=extra: Process(extra, value))
    return {'dense': Process(pace('dense', noise), noise), 'focus': Process(pace('focus', noise), noise)}
