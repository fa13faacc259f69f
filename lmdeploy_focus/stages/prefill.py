"""Prefill: the KV of prompts, block-causal, whose rows run as those of a step do; nothing is sampled."""
import torch
from torch import Tensor

from ..kernels.layout import Rows
from . import layer
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
    rows, last = view.entered, len(model.decoder.layers) - 1
    assert rows is not None
    hidden, rotary = layer.embed(model, rows, count)
    own = layer.queries(model, 0, hidden, None, rotary, rows, keys=False)
    division = layer.work(model, rows, own.query)
    for index in range(last):
        hidden, residual = layer.finish(model, index, own, view, rows, division)
        own = layer.queries(model, index + 1, hidden, residual, rotary, rows, keys=False)
