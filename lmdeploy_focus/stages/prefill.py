"""Prefill: the KV of prompts, block-causal, whose rows run as those of a step do; nothing is sampled."""
import torch
from torch import Tensor

from ..kernels.layout import Rows
from . import prefix, suffix
from .decoder import Model
from .view import FocusView


def list_rows(rows: Rows, input_ids: Tensor, seq_length: Tensor, history: Tensor, page_table: Tensor, page_size: int,
              length: int) -> None:
    """Write the rows of prompts to `rows`: those of a sequence see their own block and all before it.

    Args:
        rows: buffers for at least T rows; beyond them none has a page or sees a key.
        input_ids: [T] int64, whole blocks, those of a sequence contiguous.
        seq_length, history: [S] int64, rows of each sequence and tokens before them.
        page_table: [S, P].
        page_size: G.
        length: L.
    """
    count, sequences = input_ids.size(0), seq_length.size(0)
    ends = seq_length.cumsum(0)
    rows.start[1:sequences + 1] = ends
    rows.start[sequences + 1:] = count
    sequence = torch.repeat_interleave(torch.arange(sequences, device=input_ids.device), seq_length, output_size=count)
    position = torch.arange(count, device=input_ids.device) + (history + seq_length - ends)[sequence]
    rows.input_ids[:count], rows.position_ids[:count], rows.sequence[:count] = input_ids, position, sequence
    rows.pages[:count] = page_table[sequence, position // page_size].long()
    rows.pages[count:] = -1
    rows.offsets[:count] = position % page_size
    rows.visible[:count] = (position // length + 1) * length
    rows.visible[count:] = 0
    rows.input_ids[count:] = 0
    rows.position_ids[count:] = 0


def run(model: Model, view: FocusView, count: int) -> None:
    """All layers on the first `count` rows of `view.entered`, up to the last layer's KV."""
    hidden, rotary = prefix.embed(model, view, count)
    residual: Tensor | None = None
    work: suffix.Work = None
    for index in range(len(model.decoder.layers)):
        queries = prefix.queries(model, index, hidden, residual, rotary, view, keys=False)
        if index == len(model.decoder.layers) - 1:
            return
        work = work or suffix.work(model, view.entered, queries.query)
        hidden, residual = prefix.finish(model, index, queries, view, work)
