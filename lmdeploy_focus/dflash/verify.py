"""Accepting drafted tokens: as long as the target samples the same.

Letters: S sequences, k drafted tokens, R = k + 1 rows that the target verifies, the last token's and the drafted ones'.
"""
import torch
from lmdeploy.pytorch.backends.rejection_sampling import PLACEHOLDER_TOKEN_ID
from torch import Tensor

from .replay import Replay


def accept(sampled: Tensor, drafted: Tensor, replay: Replay | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the sampled tokens up to the first that was not drafted.

    A row's sample is what plain decoding would emit there, given the drafted tokens before it; it counts only where
    those are the emitted ones. So the emitted tokens follow the target's distribution whatever was drafted, and with a
    random stream indexed by position they are plain decoding's very tokens (arXiv 2602.06036, section 3; a greedy draft
    is a point mass, for which this is as likely to accept as rejection sampling).

    Args:
        sampled: [S, R] int64, the target's sample of every row; row j follows j drafted tokens.
        drafted: [S, k] int64.
        replay: decides in the place of the tokens, for the throughput study; what it lets through are the drafted
            tokens, whose keys and features are those that the step has computed.

    Returns:
        The emitted tokens [S, R], with LMDeploy's placeholder -1 after the last; how many rows were rejected [S], at
        most k; the last emitted token [S].
    """
    same = (sampled[:, :-1] == drafted).long().cumprod(1)
    if replay is not None:
        same = replay.agreed(same)
        sampled = torch.cat([torch.where(same, drafted, sampled[:, :-1]), sampled[:, -1:]], 1)
    accepted = same.sum(1, keepdim=True)
    emitted = sampled.clone()
    emitted[:, 1:].masked_fill_(same == 0, PLACEHOLDER_TOKEN_ID)
    return emitted, drafted.size(1) - accepted[:, 0], sampled.gather(1, accepted)[:, 0]
