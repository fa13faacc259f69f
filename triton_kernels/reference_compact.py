"""Twin of `compact`."""
import torch
from torch import Tensor

__all__ = ['compact']


def compact(source: Tensor, count: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some rows of several tensors, in the order of `source`: what stays of a step's batch.

    Args:
        source: [N] integer, row to take from each tensor.
        count: [1] integer, how many of `source` are real: the result is 0 beyond them, and `source` may hold anything
            there. None for all.
        tensors: [T, ...] each.

    Returns:
        [N, ...] of each tensor, contiguous.
    """
    if count is None:
        return tuple(tensor.index_select(0, source) for tensor in tensors)
    real = torch.arange(source.numel(), device=source.device) < count
    at = source.masked_fill(~real, 0)
    return tuple(tensor.index_select(0, at).masked_fill(~real.view(-1, *[1] * (tensor.ndim - 1)), 0)
                 for tensor in tensors)
