"""Compaction: evicted rows leave the batch, the only place where a step's row count changes (FOCUS, section 3.4)."""
from dataclasses import replace

import torch
from torch import Tensor

from .decoder import Rotary
from .prefix import Queries
from .view import FocusView


def take(view: FocusView, keep: Tensor, kv_len: Tensor) -> tuple[FocusView, Tensor]:
    """The view of the kept rows, which see `kv_len` [S] keys, and their indices [N] among the rows of `view`."""
    kept = keep.nonzero().flatten()
    before = torch.cat([keep.new_zeros(1, dtype=torch.int64), keep.long().cumsum(0)])
    rows = {name: getattr(view, name)[kept]
            for name in ('sequence', 'position', 'input_ids', 'position_ids', 'masked', 'pages', 'offsets')}
    return replace(view, q_start=before[view.q_start], kv_len=kv_len, **rows), kept


def take_queries(queries: Queries, rotary: Rotary, kept: Tensor) -> tuple[Queries, Rotary]:
    """Queries, residual and rotary tables of the kept rows; keys are in the cache already."""
    cos, sin = rotary
    smaller = replace(queries, query=queries.query[kept], key=queries.key[:0], residual=queries.residual[:, kept])
    return smaller, (cos[kept], sin[kept])
