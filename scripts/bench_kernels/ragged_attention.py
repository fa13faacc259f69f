"""Ragged attention of one layer: 7 rows a sequence, as after eviction, a block of 32, a block of 64 beside a finished
one, and 7 rows in buffers that have room for far more sequences; and the list of its work.

Run as a program it compares tiles, splits and numbers of programs, for the defaults of the wrappers.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
from lmdeploy_focus.kernels.attention_work import Tile, attention_work
from lmdeploy_focus.kernels.ragged_attention import ragged_attention

BATCHES = 1, 8, 32, 128, 256
HEADS, KV_HEADS, SIZE, PAGE, CONTEXT = 32, 8, 128, 64, 1024
GROUP = HEADS // KV_HEADS
# what a graph has room for
MOST_SEQUENCES = 256
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


def make(batch: int, mean_rows: int, sequences: int = 0, tile: Tile | None = None, splits: int | None = None,
         programs: int | None = None) -> tuple[Callable[[], object], int, int]:
    """A call, the bytes it moves and its operations. Texts have 3/4 to 5/4 of CONTEXT tokens; less than a block of rows
    varies by half. There is room for `sequences`, if that is more than the batch."""
    random = torch.Generator().manual_seed(batch + mean_rows)
    spread = mean_rows // 2 if mean_rows < 32 else 0
    rows = mean_rows + torch.randint(-spread, spread + 1, (batch,), generator=random)
    kv_len = CONTEXT + torch.randint(-CONTEXT // 4, CONTEXT // 4, (batch,), generator=random)
    columns = -(-(CONTEXT + CONTEXT // 4) // PAGE)
    total = int(rows.sum())
    room = max(batch, sequences)
    start = torch.full((room + 1,), total)
    start[:batch] = rows.cumsum(0) - rows
    cache_bytes = batch * columns * PAGE * KV_HEADS * SIZE * 2 * 2
    layers = min(MOST_LAYERS, -int(-LEAST_BYTES // cache_bytes))
    # keys and values of a page are neighbours in one pool, as in LMDeploy
    pools = torch.randn(layers, batch * columns, 2, PAGE, KV_HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
    table = torch.zeros(room, columns, dtype=torch.int64)
    table[:batch] = torch.randperm(batch * columns, generator=random).view(batch, columns)
    capacity = total * room // batch
    query = torch.randn(capacity, HEADS, SIZE, dtype=torch.bfloat16, device='cuda')
    visible = torch.zeros(capacity, dtype=torch.int64)
    visible[:total] = kv_len.repeat_interleave(rows)
    start, table, visible = start.cuda(), table.cuda(), visible.cuda()
    work = attention_work(start, GROUP, capacity, torch.bfloat16, tile)
    calls = [partial(ragged_attention, query, pool[:, 0], pool[:, 1], table, start, visible, work, 4096, SIZE**-0.5,
                     splits=splits, programs=programs) for pool in pools]
    moved = int(kv_len.sum()) * KV_HEADS * SIZE * 2 * 2 + 2 * total * HEADS * SIZE * 2
    return in_turn(calls), moved, int((rows * kv_len).sum()) * HEADS * SIZE * 4


def cases() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """(name, fn, bytes moved, operations)."""
    for batch in BATCHES:
        for mean_rows in (7, 32, 128):
            yield (f'ragged_attention batch {batch} {mean_rows} rows', *make(batch, mean_rows))
        if batch < MOST_SEQUENCES:
            yield (f'ragged_attention batch {batch} of {MOST_SEQUENCES} 7 rows', *make(batch, 7, MOST_SEQUENCES))
        start = 7 * torch.arange(batch + 1, device='cuda')
        yield f'attention_work batch {batch}', partial(attention_work, start, GROUP, 7 * batch, torch.bfloat16), 0, 0


TILES = [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 4), Tile(32, 64, 4, 3), Tile(16, 64, 4, 3),
         Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)]


def sweep() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Every tile at full batches, every number of programs of the default tile, and of splits at small batches."""
    for batch, mean_rows in ((32, 7), (256, 7), (32, 32), (256, 32), (32, 128)):
        for tile in TILES:
            yield f'batch {batch} {mean_rows} rows {" ".join(map(str, tile))}', *make(batch, mean_rows, tile=tile)
        for programs in (132, 198, 264, 396, 528, 1056):
            yield f'batch {batch} {mean_rows} rows {programs} programs', *make(batch, mean_rows, programs=programs)
    for batch in (1, 4, 8, 16, 24, 32, 48):
        for splits in (None, 1, 2, 4, 8, 16, 32):
            yield f'batch {batch} 7 rows {splits} splits', *make(batch, 7, splits=splits)


if __name__ == '__main__':
    import run
    print(run.HEADER)
    for case in sweep():
        print(run.line(run.measure(case, calls=36, repeats=11)), flush=True)
