"""Numbers of accepted tokens for the replay: drawn for each sequence and step, with a given mean.

The distribution is that of drafted tokens which are each accepted with the same probability q until the first is not
(Leviathan et al. 2023, arXiv 2211.17192, section 3.1): a geometric one, cut at k. It has one parameter, which the mean
decides, it reaches every mean from 1 to k + 1, and it is as scattered as a real run: steps with nothing accepted and
with whole blocks both come up.
"""
import numpy as np
import torch
from torch import Tensor

STRATA, ROUNDS = 64, 64


def probability(length: float, draft_tokens: int) -> float:
    """The q with which the mean acceptance length, 1 + q + ... + q^k, is `length`, to 1e-9.

    Args:
        length: accepted tokens and the target's own.
        draft_tokens: k.

    Raises:
        ValueError: the length is not between 1 and k + 1.
    """
    if not 1 <= length <= draft_tokens + 1:
        raise ValueError(f'--acceptance has {length}; it must be at least 1 and at most {draft_tokens + 1}, the '
                         'drafted tokens and one')
    below, above = 0.0, 1.0
    while above - below > 1e-9:
        middle = (below + above) / 2
        if sum(middle ** power for power in range(draft_tokens + 1)) < length:
            below = middle
        else:
            above = middle
    return below  # so that a length of 1 is exactly 0


def draw(length: float, draft_tokens: int, sequences: int, seed: int) -> np.ndarray:
    """Accepted tokens [ROUNDS * STRATA, sequences] int64.

    Each STRATA steps of a row have one draw from each of as many equally likely parts of the distribution, in a random
    order: the mean of a short run is then nearly that of a long one.
    """
    rng = np.random.default_rng(seed)
    parts = np.broadcast_to(np.arange(STRATA)[:, None], (ROUNDS, STRATA, sequences))
    uniform = (rng.permuted(parts, axis=1) + rng.random(parts.shape)) / STRATA
    # at least n are accepted with the probability q^n
    at_least = probability(length, draft_tokens) ** np.arange(1, draft_tokens + 1)
    counts = np.searchsorted(-at_least, -uniform)
    return counts.reshape(-1, sequences)


class AcceptanceReplay:
    """The engine's replay (:class:`lmdeploy_focus.dflash.replay.Replay`). A verification costs one launch here and two
    in `accept`: draws are made beforehand, and the n-th verification takes their n-th row.

    Attributes:
        counts: [steps, sequences] int64 on the device, the draws in use; None lets the tokens decide.
        step: verifications since they were chosen.
    """

    def __init__(self, draft_tokens: int, sequences: int, device: str, seed: int = 0) -> None:
        """For k drafted tokens and at most `sequences` sequences in a step."""
        self.draft_tokens, self.sequences, self.device, self.seed = draft_tokens, sequences, device, seed
        self.place = torch.arange(draft_tokens, device=device)
        self.counts: Tensor | None = None
        self.step = 0

    def choose(self, length: float | None) -> None:
        """Use draws with this mean acceptance length from the first on; None ends the replay.

        Raises:
            ValueError: see `probability`.
        """
        self.step, self.counts = 0, None
        if length is not None:
            drawn = draw(length, self.draft_tokens, self.sequences, self.seed)
            self.counts = torch.as_tensor(drawn).to(self.device)

    def agreed(self, same: Tensor) -> Tensor:
        """See :class:`lmdeploy_focus.dflash.replay.Replay`.

        Raises:
            ValueError: there are more sequences than this was made for.
        """
        sequences = same.size(0)
        if sequences > self.sequences:
            raise ValueError(f'the replay has room for {self.sequences} sequences, and there are {sequences}')
        if self.counts is None:
            return same.bool()
        row = self.counts[self.step % len(self.counts), :sequences]
        self.step += 1
        return self.place < row[:, None]
