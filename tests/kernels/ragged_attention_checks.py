"""What must hold for the Triton ragged attention, interpreted or compiled; run as a program it checks small shapes."""
from dataclasses import dataclass, replace
from typing import Any

import torch
from lmdeploy_focus.kernels import reference_ragged_attention as reference
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
    causal: bool = False


SMALL = [Case(1, 16, 4, 1, 128, 64), Case(3, 4, 1, 2, 64, 16, 6), Case(7, 16, 3, 2, 64, 32, splits=1),
         Case(2, 64, 4, 1, 64, 16, 5, splits=3), Case(4, 16, 2, 1, 32, 64, splits=3, causal=True),
         Case(7, 5, 5, 1, 64, 16, 9, splits=1, causal=True), Case(3, 64, 4, 1, 16, 32, splits=1)]
LARGE = [Case(1, 32, 4, 8, 128, 64, 40), Case(8, 32, 4, 8, 128, 64, 16), Case(32, 32, 4, 8, 128, 64, 16),
         Case(64, 64, 4, 8, 128, 64, 20), Case(17, 16, 8, 2, 128, 16, 70), Case(33, 64, 8, 1, 64, 32, 20),
         Case(5, 4, 1, 16, 64, 16, 33), Case(3, 64, 7, 4, 128, 64, 9), Case(16, 16, 4, 8, 128, 64, 17, causal=True),
         Case(100, 16, 4, 2, 64, 64, 9, causal=True), Case(1, 16, 4, 8, 128, 64, 128, splits=32, causal=True)]


def make(case: Case, dtype: torch.dtype, device: str, poison: float = float('nan'), seed: int = 0) -> dict[str, Any]:
    """Arguments: rows between rows of other tensors, caches that are differently strided views, hidden slots and unused
    columns of the table poisoned, a bound of the keys that nothing reaches, and three rows of no sequence at the end.

    The first four sequences have all rows, one, none and any number; causal, the first row of all sees no key.
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
    table = torch.full((count, case.most_pages + 3), 2**31 - 1, dtype=torch.int32)
    for s, own in enumerate(pages[:int(columns.sum())].split(columns.tolist())):
        table[s, :len(own)] = own
        token = torch.arange(int(kv_len[s]))
        for cache in caches:
            values = torch.randn(len(token), case.kv_heads, case.size, generator=random).to(dtype)
            cache[own[token // case.page_size], token % case.page_size] = values
    q_start = torch.tensor([0, *rows]).cumsum(0)
    total = int(q_start[-1]) + 3
    heads = case.kv_heads * case.group
    query = torch.randn(total, heads + 2, case.size, generator=random).to(dtype)[:, 1:-1]
    position = torch.full((total,), -9)
    for s in range(count):
        # neither the last positions of the text nor contiguous: a verified tree has gaps, a late draft exceeds kv_len
        own = slice(int(q_start[s]), int(q_start[s + 1]))
        offset = torch.randint(0, 2 * case.length, (rows[s],), generator=random).sort().values
        position[own] = (kv_len[s] - case.length + offset).clamp_min(-1)
    position[0] = -1
    arguments = {'query': query, 'key_cache': caches[0], 'value_cache': caches[1], 'page_table': table,
                 'q_start': q_start, 'kv_len': kv_len, 'position_ids': position}
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    return arguments | {'max_q': case.length, 'max_kv': (case.most_pages + 9) * case.page_size,
                        'scale': case.size**-0.5, 'causal': case.causal, 'splits': case.splits}


def attend(arguments: dict[str, Any]) -> Tensor:
    """The output of the rows that belong to a sequence; memory that the kernel may be given holds NaN before."""
    query = arguments['query']
    # the allocator hands out the same memory again: a row that is not written shows
    poison = [torch.full((n, *query.shape), float('nan'), dtype=dtype, device=query.device)
              for n, dtype in ((1, query.dtype), (arguments['splits'] or 32, torch.float32))]
    del poison
    out = ragged_attention(**arguments)
    assert out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous()
    return out[:int(arguments['q_start'][-1])]


def check_twin(case: Case, dtype: torch.dtype, device: str) -> None:
    """The values of the twin, also with another content of hidden slots and a looser bound of the keys; with a fixed
    number of splits the same bits."""
    arguments = make(case, dtype, device)
    result = attend(arguments)
    # of torch's kernels on a GPU, the plain one alone keeps float32
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference.ragged_attention(**arguments)[:len(result)]
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    arguments = make(case, dtype, device, poison=3e4)
    arguments['max_kv'] *= 50
    again = attend(arguments)
    torch.testing.assert_close(again, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert case.splits is None or again.equal(result)


def check_company(case: Case, dtype: torch.dtype, device: str) -> None:
    """With a fixed number of splits a sequence has the same bits alone and in company."""
    arguments = make(case, dtype, device, seed=1) | {'splits': case.splits or 4}
    together = attend(arguments)
    for s in range(min(case.sequences, 8)):
        first, last = arguments['q_start'][s:s + 2].tolist()
        own = {'query': arguments['query'][first:last], 'position_ids': arguments['position_ids'][first:last],
               'page_table': arguments['page_table'][s:s + 1], 'kv_len': arguments['kv_len'][s:s + 1],
               'q_start': arguments['q_start'][s:s + 2] - first}
        assert attend(arguments | own).equal(together[first:last]), s


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
    """Arguments that the kernel cannot take raise."""
    good = make(Case(3, 4, 1, 2, 64, 16), torch.float32, device)
    refused = [{'query': good['query'][..., :48]}, {'query': good['query'].half()}, {'query': good['query'][:, :1]},
               {'key_cache': good['key_cache'][:, :8], 'value_cache': good['value_cache'][:, :8]},
               {'value_cache': good['value_cache'][:-1]}, {'q_start': good['q_start'][:-1]},
               {'kv_len': good['kv_len'][:-1]}, {'max_q': 65}, {'max_q': 0}, {'max_kv': -1}, {'scale': 0.0},
               {'splits': 0}, {'splits': 33}, {'causal': True, 'position_ids': None},
               {'causal': True, 'position_ids': good['position_ids'][1:]}]
    for changes in refused:
        try:
            ragged_attention(**good | changes)
        except ValueError:
            continue
        raise AssertionError(list(changes))


def main() -> None:
    torch.set_num_threads(1)
    for case in SMALL:
        check_twin(case, torch.float32, 'cpu')
    # the interpreter's dot takes the bits of bfloat16 for integers; float16 has the tiles of bfloat16
    for case in (SMALL[2], SMALL[3], SMALL[5]):
        check_twin(case, torch.float16, 'cpu')
    check_company(replace(SMALL[2], causal=True), torch.float32, 'cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
