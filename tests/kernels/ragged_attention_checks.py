"""What must hold for the Triton ragged attention, interpreted or compiled; run as a program it checks small shapes."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from lmdeploy_focus.kernels import reference_attention_work, reference_ragged_attention
from lmdeploy_focus.kernels.attention_work import AttentionWork, Tile, attention_work, default_tile
from lmdeploy_focus.kernels.ragged_attention import ragged_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# around the end of a page and of a block of 64 keys; a sequence without keys is the fifth
EDGES = (-1, 0, 1, 5)


@dataclass(frozen=True)
class Case:
    """Sequences, most rows of one, query heads of a key head, key heads, D, G, longest text in pages."""
    sequences: int
    length: int
    group: int
    kv_heads: int
    size: int
    page_size: int
    most_pages: int = 3
    splits: int | None = None
    programs: int | None = None
    tile: Tile | None = None


# fewer and more items than programs
SMALL = [Case(1, 16, 4, 1, 128, 64, programs=3), Case(3, 4, 1, 2, 64, 16, 6, programs=40),
         Case(7, 16, 2, 2, 64, 32, splits=1, programs=5), Case(2, 64, 2, 1, 64, 16, 5, splits=3, programs=7),
         Case(1, 7, 4, 2, 32, 16, 9, programs=64), Case(17, 3, 8, 1, 16, 32, splits=2, programs=11),
         Case(3, 128, 1, 1, 16, 32, splits=8, programs=2), Case(2, 3, 3, 1, 32, 64, 2, splits=32),
         Case(5, 9, 4, 1, 32, 64, programs=1)]
LARGE = [Case(1, 32, 4, 8, 128, 64, 40), Case(8, 32, 4, 8, 128, 64, 16), Case(32, 32, 4, 8, 128, 64, 16),
         Case(64, 128, 4, 8, 128, 64, 20), Case(17, 16, 8, 2, 128, 16, 70), Case(33, 64, 8, 1, 64, 32, 20),
         Case(5, 4, 1, 16, 64, 16, 33), Case(3, 64, 7, 4, 128, 64, 9), Case(16, 16, 4, 8, 128, 64, 17, splits=2),
         Case(100, 16, 4, 2, 64, 64, 9), Case(256, 7, 4, 8, 128, 64, 6), Case(1, 16, 4, 8, 128, 64, 128, splits=32),
         Case(9, 40, 4, 8, 128, 64, 12, tile=Tile(128, 64, 8, 3))]


def make(case: Case, dtype: torch.dtype, device: str, poison: float = float('nan'), seed: int = 0) -> dict[str, Any]:
    """Arguments without the work: rows between rows of other tensors, caches that are differently strided views, hidden
    slots and unused columns of the table poisoned, a bound of the keys that nothing reaches, and three rows of no
    sequence at the end.

    The first four sequences have all rows, one, none and any number. A sequence's first rows see less than its last
    ones, as those of a finished block do, and the first row of all sees no key.
    """
    random = torch.Generator().manual_seed(seed + case.sequences * case.length * case.size)
    count = case.sequences
    rows = [case.length, 1, 0, *torch.randint(1, case.length + 1, (count,), generator=random).tolist()][:count]
    texts = torch.randint(1, case.most_pages + 1, (count,), generator=random) * case.page_size
    texts[0] = case.most_pages * case.page_size - case.page_size
    kv_len = torch.tensor([0 if s == 4 else max(1, int(texts[s]) + EDGES[s % 4]) for s in range(count)])
    columns = -(-kv_len // case.page_size)
    pages = torch.randperm(int(columns.sum()) + 3, generator=random)
    key_pool = torch.full((len(pages), 3, case.page_size, case.kv_heads, case.size), poison, dtype=dtype)
    value_pool = torch.full((len(pages), case.page_size, case.kv_heads + 1, case.size), poison, dtype=dtype)
    caches = key_pool[:, 1], value_pool[:, :, 1:]
    table = torch.full((count, case.most_pages + 3), 2**31 - 1, dtype=torch.int32 if count % 2 else torch.int64)
    for s, own in enumerate(pages[:int(columns.sum())].split(columns.tolist())):
        table[s, :len(own)] = own
        token = torch.arange(int(kv_len[s]))
        for cache in caches:
            values = torch.randn(len(token), case.kv_heads, case.size, generator=random).to(dtype)
            cache[own[token // case.page_size], token % case.page_size] = values
    start = torch.tensor([0, *rows]).cumsum(0)
    total = int(start[-1]) + 3
    heads = case.kv_heads * case.group
    query = torch.randn(total, heads + 2, case.size, generator=random).to(dtype)[:, 1:-1]
    visible = torch.full((total,), 2**20)
    for s in range(count):
        pending = rows[s] // 3
        hidden = torch.randint(0, int(kv_len[s]) + 1, (1,), generator=random).expand(pending)
        visible[start[s]:start[s + 1]] = kv_len[s] - torch.cat([hidden, torch.zeros(rows[s] - pending)]).long()
    visible[0] = 0
    if rows[0] == 1:
        visible[0] = kv_len[0]
    arguments = {'query': query, 'key_cache': caches[0], 'value_cache': caches[1], 'page_table': table, 'start': start,
                 'visible': visible}
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    return arguments | {'max_kv': (case.most_pages + 9) * case.page_size, 'scale': case.size**-0.5,
                        'splits': case.splits, 'programs': case.programs}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is handed out without content holds NaN: what a kernel does not write shows."""
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return torch.full(*args, float('nan'), **kwargs)

    with mock.patch.object(torch, 'empty', empty):
        yield


def attend(arguments: dict[str, Any], tile: Tile | None = None) -> Tensor:
    """The output of the rows that belong to a sequence; nothing else is written."""
    query, rows = arguments['query'], int(arguments['start'][-1])
    group = query.size(1) // arguments['key_cache'].size(2)
    work = attention_work(arguments['start'], group, query.size(0) + 5, query.dtype, tile)
    with poisoned():
        out = ragged_attention(**arguments, work=work)
    assert out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous()
    assert out[rows:].isnan().all()
    return out[:rows]


def check_twin(case: Case, dtype: torch.dtype, device: str) -> None:
    """The values of the twin, also with another content of hidden slots and a looser bound of the keys; with a fixed
    number of splits the same bits, whatever the number of programs."""
    arguments = make(case, dtype, device)
    result = attend(arguments, case.tile)
    # of torch's kernels on a GPU, the plain one alone keeps float32
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference_ragged_attention.ragged_attention(**arguments, work=None)[:len(result)]
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    arguments = make(case, dtype, device, poison=3e4)
    arguments['max_kv'] *= 50
    arguments['programs'] = None if case.splits else case.programs
    again = attend(arguments, case.tile)
    torch.testing.assert_close(again, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert case.splits is None or again.equal(result)


def check_company(case: Case, dtype: torch.dtype, device: str) -> None:
    """With a fixed number of splits a sequence has the same bits alone and in company."""
    arguments = make(case, dtype, device, seed=1) | {'splits': case.splits or 4}
    together = attend(arguments)
    for s in range(min(case.sequences, 8)):
        first, last = arguments['start'][s:s + 2].tolist()
        own = {'query': arguments['query'][first:last], 'visible': arguments['visible'][first:last],
               'page_table': arguments['page_table'][s:s + 1], 'start': arguments['start'][s:s + 2] - first}
        assert attend(arguments | own).equal(together[first:last]), s


def check_window(case: Case, dtype: torch.dtype, device: str) -> None:
    """The values of the twin where rows are blind to their first keys: to none, some, all but one, and all; and the
    same bits as without a window where none is hidden and the splits are the same."""
    arguments = make(case, dtype, device)
    random = torch.Generator().manual_seed(case.size)
    visible = arguments['visible'].cpu()
    hidden = (visible - torch.randint(-3, case.page_size + 9, visible.shape, generator=random)).clamp_min(0)
    hidden[::5] = 0
    arguments['hidden'] = hidden.to(device)
    result = attend(arguments, case.tile)
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference_ragged_attention.ragged_attention(**arguments, work=None)[:len(result)]
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    arguments |= {'splits': case.splits or 2, 'hidden': torch.zeros_like(arguments['visible'], dtype=torch.int32)}
    without = attend(arguments | {'hidden': None}, case.tile)
    assert attend(arguments, case.tile).equal(without)


def check_decision(device: str, dtype: torch.dtype) -> None:
    """The number of splits that the tiles on the device call for has the bits of that number when it is asked for."""
    case = Case(2, 16, 4, 1, 16, 64, 4)
    arguments = make(case, dtype, device)
    # 64 packed rows of the first sequence and 4 of the second; a bound of 13 pages of 64 keys
    tiles = attention_work(arguments['start'], 4, 64, dtype, Tile(16, 32, 4, 1))
    items = int(tiles.count)
    assert items == 5
    for programs, number in ((6, 1), (7, 2), (11, 4), (99, 16)):
        forced = attend(arguments | {'splits': number}, tiles.tile)
        assert attend(arguments | {'programs': programs}, tiles.tile).equal(forced), (programs, number)


def check_work(device: str) -> None:
    """The tiles of the twin, for all sizes of tiles and groups, also where an earlier step has left more of them."""
    random = torch.Generator().manual_seed(3)
    for sequences, most, group in ((1, 128, 4), (3, 5, 1), (17, 64, 8), (5, 1, 1), (300, 9, 3)):
        if sequences == 300 and device == 'cpu':
            continue  # a minute in the interpreter
        for tile in (Tile(16, 32, 4, 1), Tile(64, 64, 4, 3)):
            out = AttentionWork.empty(sequences, group, sequences * most, torch.float16, device, tile)
            for _ in range(3):
                rows = torch.randint(0, most + 1, (sequences,), generator=random)
                start = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).to(device)
                made = attention_work(start, group, sequences * most, torch.float16, tile, out)
                expected = reference_attention_work.attention_work(start, group, sequences * most, torch.float16, tile)
                count = int(expected.count)
                assert made is out and int(out.count) == count
                assert out.tiles[:count].equal(expected.tiles[:count])
    bound = torch.tensor([0, 3, 3, 8], device=device)
    full = attention_work(bound, 1, 8, torch.float32)
    assert int(full.count) == 2 and full.tile == default_tile(torch.float32)
    assert int(attention_work(bound.new_zeros(4), 4, 8, torch.float32).count) == 0


def check_graph(dtype: torch.dtype) -> None:
    """A CUDA graph of the list and the attention, captured without rows, runs whatever rows there are."""
    case = Case(40, 32, 4, 8, 128, 64, 12)
    batches = [make(replace(case, sequences=count), dtype, 'cuda', seed=count) for count in (1, 6, 40)]
    static: dict[str, Tensor] = {name: torch.zeros_like(batches[-1][name]) for name in ('query', 'visible', 'start')}
    pages = max(batch['key_cache'].size(0) for batch in batches)
    for name in ('key_cache', 'value_cache'):
        static[name] = torch.zeros((pages, *batches[0][name].shape[1:]), dtype=dtype, device='cuda')
    static['page_table'] = torch.zeros_like(batches[-1]['page_table'])
    bounds = {'max_kv': 4096, 'scale': 0.1}
    work = AttentionWork.empty(case.sequences, case.group, len(static['query']), dtype, 'cuda')

    def step() -> Tensor:
        attention_work(static['start'], case.group, len(static['query']), dtype, out=work)
        return ragged_attention(**static, work=work, **bounds)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for batch in batches:
        count, rows = batch['page_table'].size(0), len(batch['query'])
        static['start'][:count + 1] = batch['start']
        static['start'][count + 1:] = batch['start'][-1]
        static['page_table'][:count] = batch['page_table']
        for name in ('query', 'visible'):
            static[name][:rows] = batch[name]
        for name in ('key_cache', 'value_cache'):
            static[name][:len(batch[name])] = batch[name]
        graph.replay()
        expected = attend(batch | bounds)
        assert out[:len(expected)].equal(expected), count


def check_far_page(device: str, dtype: torch.dtype) -> None:
    """A page whose offset in the cache does not fit in 32 bits; the pool takes 4 GiB and a little more."""
    case = Case(1, 4, 4, 2, 64, 64, 2)
    arguments = make(case, dtype, device)
    pages = arguments['key_cache'].size(0)
    stride = 2**31 // (pages - 1) // 16 * 16 + 16
    for name in ('key_cache', 'value_cache'):
        small = arguments[name]
        far = torch.empty((pages - 1) * stride + small[0].numel(), dtype=dtype, device=device)
        far = far.as_strided(small.shape, (stride, small.size(2) * small.size(3), small.size(3), 1))
        arguments[name] = far.copy_(small)
    expected = attend(make(case, dtype, device))
    used = arguments['page_table'][0, 0]
    arguments['page_table'][0, 0] = pages - 1
    for name in ('key_cache', 'value_cache'):
        arguments[name][pages - 1] = arguments[name][used].clone()
    assert attend(arguments).equal(expected)


def check_refusals(device: str) -> None:
    """Arguments that the kernels cannot take raise."""
    good = make(Case(3, 4, 1, 2, 64, 16), torch.float32, device)
    rows = good['query'].size(0)
    good['work'] = attention_work(good['start'], 1, rows, torch.float32)
    refused = [{'query': good['query'][..., :48]}, {'query': good['query'].half()}, {'query': good['query'][:, :1]},
               {'key_cache': good['key_cache'][:, :8], 'value_cache': good['value_cache'][:, :8]},
               {'value_cache': good['value_cache'][:-1]}, {'start': good['start'][:-1]},
               {'visible': good['visible'][:-1]}, {'visible': good['visible'].float()},
               {'visible': good['visible'].repeat_interleave(2)[::2]}, {'page_table': good['page_table'].short()},
               {'page_table': good['page_table'].T.contiguous().T}, {'max_kv': -1}, {'scale': 0.0}, {'splits': 0},
               {'splits': 33}, {'programs': 0}, {'hidden': good['visible'][:-1]}, {'hidden': good['visible'].float()},
               {'work': attention_work(good['start'], 2, rows, torch.float32)},
               {'work': AttentionWork.empty(3, 1, 1, torch.float32, device)}]
    for changes in refused:
        with pytest.raises(ValueError, match='ragged_attention'):
            ragged_attention(**good | changes)
    work = {'start': good['start'], 'group': 1, 'capacity': rows, 'dtype': torch.float32, 'out': good['work']}
    attention_work(**work)
    for changes in ({'start': good['start'].int()}, {'start': good['start'].repeat_interleave(2)[::2]},
                    {'start': good['start'][:1]}, {'group': 2}, {'group': 0}, {'capacity': -1}, {'capacity': 999},
                    {'dtype': torch.float16}, {'tile': Tile(16, 64, 4, 1)}):
        with pytest.raises(ValueError, match='attention_work'):
            attention_work(**work | changes)


def main() -> None:
    torch.set_num_threads(1)
    check_work('cpu')
    for case in SMALL:
        check_twin(case, torch.float32, 'cpu')
    # the interpreter's dot takes the bits of bfloat16 for integers; float16 has the tiles of bfloat16
    for case in (SMALL[2], SMALL[3], SMALL[4], SMALL[6]):
        check_twin(case, torch.float16, 'cpu')
    for case in (SMALL[2], replace(SMALL[3], programs=50)):
        check_company(case, torch.float32, 'cpu')
    for case in (SMALL[1], SMALL[3]):
        check_window(case, torch.float32, 'cpu')
    check_decision('cpu', torch.float32)
    check_refusals('cpu')


if __name__ == '__main__':
    main()
