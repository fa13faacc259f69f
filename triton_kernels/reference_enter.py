"""Twin of `enter`: the rows that enter a step, in plain torch."""
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .reference_plan import Plan, kept_rows

__all__ = ['Entered', 'enter']


@dataclass
class Entered(Plan):
    """The rows that enter a step, as a plan that keeps all of them, with what the embedding needs.

    Attributes:
        input_ids: [C] int64, tokens; 0 beyond the rows there are.
        position_ids: [C] int64, position in the whole text; 0 beyond.
    """
    input_ids: Tensor
    position_ids: Tensor


def enter(ids: Tensor, masked: Tensor, cached: Tensor, uncached: Tensor, history: Tensor, progress: Tensor,
          page_table: Tensor, page_size: int, cache: str = 'delayed-neighbour', full_commit: bool = False,
          kv_visible: str = 'progress', count: Tensor | None = None, out: Entered | None = None) -> Entered:
    """Which positions enter a step (FOCUS, section 3.5), and their rows.

    Args:
        ids: [S, L] int64.
        masked, cached, uncached: [S] int64 maps, of `settle.Blocks`.
        history, progress: [S] int64.
        page_table: [S, P] int64 or int32.
        page_size: G.
        cache: 'delayed-neighbour', 'delayed' or 'off'.
        full_commit: a finished block is run once more as a whole.
        kv_visible: 'progress' or 'reference'.
        count: [1] number of sequences that are real; None for all. The others enter no row.
        out: where to write.
    """
    sequences, length = ids.shape
    place = torch.arange(length, device=ids.device)
    waiting, held, entering = (((flags[:, None] >> place) & 1).bool() for flags in (masked, cached, uncached))
    whole = ~entering.any(1)
    if cache == 'off':
        whole = torch.ones_like(whole)
    if full_commit:
        whole = whole | ~(waiting | held).any(1)
    entering = entering | whole[:, None]
    if count is not None:
        entering = entering & (torch.arange(sequences, device=ids.device) < count)[:, None]
    rightmost = torch.where(entering, place, -1).amax(1)
    last = rightmost if kv_visible == 'reference' else torch.maximum(rightmost, progress)
    kv_len = torch.where(entering.any(1), history + last + 1, 0)
    start = torch.cat([history.new_zeros(1), entering.sum(1).cumsum(0)])
    plan = kept_rows(entering, entering, waiting & entering, start, history, page_table, page_size, kv_len, rightmost)
    own = plan.rows >= 0
    result = Entered(**vars(plan), input_ids=torch.where(own, ids[plan.sequence, plan.position], 0),
                     position_ids=torch.where(own, history[plan.sequence] + plan.position, 0))
    if out is None:
        return result
    for f in fields(Entered):
        getattr(out, f.name).copy_(getattr(result, f.name))
    return out
