"""The list of a step's attention work in one launch; twin: `reference_attention_work`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference_attention_work import AttentionWork, Tile, default_tile, most_tiles

__all__ = ['AttentionWork', 'Tile', 'attention_work', 'default_tile']


@triton.jit
def _work_kernel(start, tiles, count, capacity, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr,
                 BLOCK: tl.constexpr):
    """One program a sequence: its tiles, behind those of the sequences before it."""
    sequence = tl.program_id(0)
    sequences = tl.num_programs(0)
    index = tl.arange(0, SEQUENCES)
    first = tl.load(start + index, mask=index < sequences, other=0)
    last = tl.load(start + index + 1, mask=index < sequences, other=0)
    number = tl.cdiv((last - first).to(tl.int32) * GROUP, BLOCK_M)
    at = tl.sum(tl.where(index < sequence, number, 0), 0)
    own = tl.sum(tl.where(index == sequence, number, 0), 0)
    row = tl.sum(tl.where(index == sequence, first, 0), 0).to(tl.int32)
    packed = tl.sum(tl.where(index == sequence, last - first, 0), 0).to(tl.int32) * GROUP
    for begin in range(0, own, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        column = tiles + (at + tile) * 4
        real = (tile < own) & (at + tile < capacity)
        tl.store(column, sequence + tl.zeros_like(tile), mask=real)
        tl.store(column + 1, row + tl.zeros_like(tile), mask=real)
        tl.store(column + 2, tile * BLOCK_M, mask=real)
        tl.store(column + 3, packed + tl.zeros_like(tile), mask=real)
    if sequence == sequences - 1:
        tl.store(count, tl.minimum(at + own, capacity))


def attention_work(start: Tensor, group: int, capacity: int, dtype: torch.dtype, tile: Tile | None = None,
                   out: AttentionWork | None = None) -> AttentionWork:
    """The tiles of a step's rows, for all layers that run the same rows.

    Args:
        start: [S + 1] int64, first row of each sequence; S at least 1.
        group: query heads of a key head.
        capacity: bound of the rows.
        dtype: of the queries.
        tile: None takes the one for `dtype`.
        out: where to write, of `AttentionWork.empty` with the same arguments.

    Raises:
        ValueError: arguments that the kernel cannot take.
    """
    sequences = start.numel() - 1
    if start.ndim != 1 or sequences < 1 or start.dtype != torch.int64 or not start.is_contiguous():
        raise ValueError(f'start {tuple(start.shape)} of {start.dtype}: attention_work takes S + 1 contiguous int64, S '
                         'at least 1')
    if group < 1 or capacity < 0:
        raise ValueError(f'group={group}, capacity={capacity}: attention_work takes a group from 1 and a bound from 0')
    if out is None:
        out = AttentionWork.empty(sequences, group, capacity, dtype, start.device, tile)
    elif (out.group, out.tile) != (group, tile or default_tile(dtype)) or (
            out.tiles.size(0) < most_tiles(sequences, group, capacity, out.tile)):
        raise ValueError(f'out has room for {out.tiles.size(0)} tiles {tuple(out.tile)} of groups of {out.group}: '
                         f'attention_work needs {most_tiles(sequences, group, capacity, tile or default_tile(dtype))} '
                         f'of {tuple(tile or default_tile(dtype))} and {group}')
    _work_kernel[(sequences,)](start, out.tiles, out.count, out.tiles.size(0), GROUP=group, BLOCK_M=out.tile.block_m,
                               SEQUENCES=triton.next_power_of_2(sequences), BLOCK=8, num_warps=1)
    return out
