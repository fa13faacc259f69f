"""Twin of `greedy_head`: the most probable token of each row and its probability, in plain torch."""
import torch
from torch import Tensor

__all__ = ['greedy_head']


def greedy_head(logits: Tensor, mask_token: int, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Greedy sampling and confidence of R rows.

    Args:
        logits: [R, V], not changed.
        mask_token: banned in every row: it would be committed as text.
        count: [1] number of rows that are real; None for all.

    Returns:
        Tokens [R] int64, the smallest of equally probable ones, and their softmax probability [R] float32. A row with a
        logit that is not a number gives the first such token and NaN. Rows from `count` on give -1 and 0.
    """
    values = logits.float().index_fill(1, torch.tensor([mask_token], device=logits.device), float('-inf'))
    tokens = torch.where(values.isnan(), float('inf'), values).argmax(1)
    scores = (values.gather(1, tokens[:, None])[:, 0] - values.logsumexp(1)).exp()
    if count is None:
        return tokens, scores
    real = torch.arange(logits.size(0), device=logits.device) < count
    return torch.where(real, tokens, -1), torch.where(real, scores, 0)
