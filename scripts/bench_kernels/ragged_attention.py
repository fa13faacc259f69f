"""Ragged attention of one layer: 7 rows a sequence, as after eviction, all 32, and a DFlash verification of 16.

Run as a program it compares tiles and splits, for the tables of the kernel's wrapper.
"""
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from lmdeploy_focus.kernels import ragged_attention as kernels

BATCHES = 1, 8, 32, 128, 256
HEADS, KV_HEADS, SIZE, PAGE, LENGTH, CONTEXT = 32, 8, 128, 64, 32, 1024
# Layers take turns until their caches exceed L2 (60 MB) several times.
LEAST_BYTES = 400e6
MOST_LAYERS = 36


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """A function that makes the next of the calls each time."""
    turn = iter(())

    def call() -> object:
        nonlocal turn
        following = next(turn, None)
        if following is None:
            turn = iter(calls)
            following = next(turn)
        return following()

    return call


def make(batch: int, mean_rows: int, causal: bool = False,
         splits: int | None = None) -> tuple[Callable[[], object], int, int]:
    """A call, the bytes it moves and its operations. Texts have 3/4 to 5/4 of CONTEXT tokens, rows vary by half."""
    random = torch.Generator().manual_seed(batch + mean_rows)
    spread = mean_rows // 2 if mean_rows < LENGTH and not causal else 0
    rows = mean_rows + torch.randint(-spread, spread + 1, (batch,), generator=random)
    kv_len = CONTEXT + torch.randint(-CONTEXT // 4, CONTEXT // 4, (batch,), generator=random)
    columns = -(-(CONTEXT + CONTEXT // 4) // PAGE)
    q_start = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    total = int(q_start[-1])
    sequence = torch.repeat_interleave(torch.arange(batch), rows)
    positions = kv_len[sequence] - rows[sequence] + torch.arange(total) - q_start[sequence]
    cache_bytes = batch * columns * PAGE * KV_HEADS * SIZE * 2 * 2
    layers = min(MOST_LAYERS, -int(-LEAST_BYTES // cache_bytes))
    # keys and values of a page are neighbours in one pool, as in LMDeploy
    pools = torch.randn(layers, batch * columns, 2, PAGE, KV_HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
    table = torch.randperm(batch * columns, generator=random).view(batch, columns).cuda()
    query = torch.randn(total, HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
    q_start, lengths, positions = q_start.cuda(), kv_len.cuda(), positions.cuda()
    most_rows = mean_rows if causal else LENGTH
    calls = [partial(kernels.ragged_attention, query, pool[:, 0], pool[:, 1], table, q_start, lengths, most_rows,
                     columns * PAGE, SIZE**-0.5, causal=causal, position_ids=positions, splits=splits)
             for pool in pools]
    moved = int(kv_len.sum()) * KV_HEADS * SIZE * 2 * 2 + 2 * total * HEADS * SIZE * 2
    return in_turn(calls), moved, int((rows * kv_len).sum()) * HEADS * SIZE * 4


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """(name, fn, bytes moved, operations)."""
    for batch in BATCHES:
        for name, mean_rows, causal in (('7 rows', 7, False), ('32 rows', 32, False), ('16 rows causal', 16, True)):
            yield (f'ragged_attention batch {batch} {name}', *make(batch, mean_rows, causal))


TILES = [{'BLOCK_M': 64, 'BLOCK_N': 64, 'num_warps': 4, 'num_stages': 3},
         {'BLOCK_M': 64, 'BLOCK_N': 64, 'num_warps': 4, 'num_stages': 2},
         {'BLOCK_M': 64, 'BLOCK_N': 32, 'num_warps': 4, 'num_stages': 4},
         {'BLOCK_M': 32, 'BLOCK_N': 64, 'num_warps': 4, 'num_stages': 3},
         {'BLOCK_M': 128, 'BLOCK_N': 64, 'num_warps': 8, 'num_stages': 3},
         {'BLOCK_M': 128, 'BLOCK_N': 64, 'num_warps': 8, 'num_stages': 2},
         {'BLOCK_M': 128, 'BLOCK_N': 32, 'num_warps': 8, 'num_stages': 3, 'maxnreg': 128}]


def sweep() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Cases of every tile at full batches, and of every number of splits at small ones."""
    for batch, mean_rows in ((32, 7), (256, 7), (32, 32), (256, 32)):
        call, moved, flops = make(batch, mean_rows)
        for tile in TILES:
            def fn(call=call, tile=tile) -> object:
                with mock.patch.object(kernels, '_tile', return_value=tile):
                    return call()

            yield f'batch {batch} {mean_rows} rows {" ".join(map(str, tile.values()))}', fn, moved, flops
    for batch in (1, 8, 16, 32, 48):
        for splits in (1, 2, 4, 8, 16, 32):
            yield (f'batch {batch} 7 rows {splits} splits', *make(batch, 7, splits=splits))


if __name__ == '__main__':
    import run
    print(run.HEADER)
    for case in sweep():
        print(run.line(run.measure(case, calls=36, repeats=11)), flush=True)
