"""The list of a step's attention work, and the twin of `attention_work`, which makes it."""
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ['AttentionWork', 'Tile', 'attention_work', 'default_tile', 'most_tiles']


class Tile(NamedTuple):
    """A tile of the kernel: packed rows and keys, warps, and key blocks in flight."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def default_tile(dtype: torch.dtype) -> Tile:
    """The tile for queries of a data type."""
    if dtype == torch.float32:
        # exact products use no tensor cores: small tiles stay in registers
        return Tile(16, 32, 4, 1)
    # one warpgroup instruction is 64 rows high; two programs of three stages fill a multiprocessor's shared memory
    return Tile(64, 64, 4, 3)


@dataclass
class AttentionWork:
    """The tiles of the rows of a step, in the order of the rows; the heads of a group are packed as further rows.

    Attributes:
        tiles: [T, 4] int32, for each tile its sequence, the sequence's first row, the tile's first packed row, counted
            from that row, and the packed rows of the sequence; beyond the number of tiles anything.
        count: [1] int32, number of tiles.
        group: query heads of a key head.
        tile: shape of the tiles.
    """
    tiles: Tensor
    count: Tensor
    group: int
    tile: Tile

    @classmethod
    def empty(cls, sequences: int, group: int, capacity: int, dtype: torch.dtype, device: torch.device | str,
              tile: Tile | None = None) -> 'AttentionWork':
        """Room for the tiles of at most `capacity` rows of S sequences; none yet."""
        tile = tile or default_tile(dtype)
        most = most_tiles(sequences, group, capacity, tile)
        return cls(torch.zeros((most, 4), dtype=torch.int32, device=device),
                   torch.zeros(1, dtype=torch.int32, device=device), group, tile)


def most_tiles(sequences: int, group: int, rows: int, tile: Tile) -> int:
    """Bound of the tiles of so many rows: only the last tile of a sequence is not full."""
    return -(-rows * group // tile.block_m) + min(sequences, rows)


def attention_work(start: Tensor, group: int, capacity: int, dtype: torch.dtype, tile: Tile | None = None,
                   out: AttentionWork | None = None) -> AttentionWork:
    """The tiles of a step's rows, for all layers that run the same rows.

    Args:
        start: [S + 1] int64, first row of each sequence.
        group: query heads of a key head.
        capacity: bound of the rows.
        dtype: of the queries.
        tile: None takes the one for `dtype`.
        out: where to write, of `AttentionWork.empty` with the same arguments.
    """
    if out is None:
        out = AttentionWork.empty(start.numel() - 1, group, capacity, dtype, start.device, tile)
    packed = (start[1:] - start[:-1]) * group
    tiles = -(-packed // out.tile.block_m)
    count = int(tiles.sum())
    sequence = torch.repeat_interleave(torch.arange(len(tiles), device=start.device), tiles, output_size=count)
    index = torch.arange(count, device=start.device) - (tiles.cumsum(0) - tiles)[sequence]
    columns = sequence, start[sequence], index * out.tile.block_m, packed[sequence]
    out.tiles[:count] = torch.stack(columns, 1).to(torch.int32)
    out.count.fill_(count)
    return out
