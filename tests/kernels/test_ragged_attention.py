"""Attention of ragged rows over the paged cache, against dense float64 attention of one row at a time."""
import pytest
import torch
from lmdeploy_focus.kernels import reference_ragged_attention as reference
from lmdeploy_focus.kernels.reference_attention_work import Tile, attention_work
from torch import Tensor

from .. import oracle
from .paged import Paged, make_paged

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# the last key of a page, none, and one more; then longer texts, so that sequences end on different pages
EDGES = (-1, 0, 1, 5)


def attend(query: Tensor, paged: Paged, rows: list[int], visible: Tensor, max_kv: int, scale: float,
           hidden: Tensor | None = None) -> Tensor:
    start = torch.tensor([0, *rows]).cumsum(0)
    return reference.ragged_attention(query, paged.key_cache, paged.value_cache, paged.page_table, start, visible, None,
                                      max_kv, scale, hidden=hidden)


def dense(query: Tensor, paged: Paged, rows: list[int], visible: Tensor, scale: float,
          hidden: Tensor | None = None) -> Tensor:
    """Each row over its own keys alone; 0 without any."""
    sequence = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).tolist()
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, s in enumerate(sequence):
        own = slice(0 if hidden is None else int(hidden[row]), int(visible[row]))
        if own.start < own.stop:
            out[row] = oracle.attention(query[row:row + 1], paged.keys[s][own], paged.values[s][own], scale)[0]
    return out


@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('page_size', [16, 64])
@pytest.mark.parametrize('sequences,length,group,size', [(1, 4, 1, 32), (1, 128, 8, 128), (3, 16, 4, 64),
                                                         (4, 64, 2, 32), (17, 4, 8, 64), (17, 32, 1, 16)])
def test_attention_is_dense_attention(sequences, length, group, size, page_size, dtype):
    """Red when: a row sees a key at or beyond its own end, another sequence's rows or pages, or a stale slot (those
    hold NaN), a row without keys is not 0, a page's order is lost, heads of a group are mixed up, sequences of many
    and of few rows change places, rows of no sequence take part, or sums are not float32."""
    random = torch.Generator().manual_seed(length * size + sequences)
    rows = [length, 1, 0, *torch.randint(1, length + 1, (sequences,), generator=random).tolist()][:sequences]
    lengths = [page_size * (1 + s % 3) + EDGES[s % 4] for s in range(sequences)]
    heads, kv_heads = 8, 8 // group
    paged = make_paged(lengths, page_size, kv_heads, size, dtype, seed=sequences)
    query = torch.randn(sum(rows) + 2, heads, size, generator=random).to(dtype)
    query[sum(rows):] = float('nan')
    ends = torch.tensor(lengths).repeat_interleave(torch.tensor(rows))
    visible = (ends - torch.randint(0, 20, ends.shape, generator=random)).clamp_min(0)
    visible[::2] = ends[::2]
    if rows[0] > 1:
        visible[0] = 0
    result = attend(query, paged, rows, torch.cat([visible, torch.tensor([999, 0])]), max(lengths), size**-0.5)
    assert result.dtype == dtype and result.shape == query.shape and not result[sum(rows):].any()
    expected = dense(query[:sum(rows)], paged, rows, visible, size**-0.5)
    torch.testing.assert_close(result[:sum(rows)].double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize('window', [1, 16, 23, 200])
def test_a_window_is_dense_attention_within_it(window):
    """Red when: a row sees a key before its window, or not the first one in it; a row that is blind to all of its keys
    is not 0."""
    rows, lengths = [3, 0, 1, 7, 2], [20, 64, 1, 33, 50]
    paged = make_paged(lengths, 16, 2, 32, torch.float32, seed=1)
    query = torch.randn(13, 4, 32, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor(lengths).repeat_interleave(torch.tensor(rows))
    hidden = (visible - window).clamp_min(0)
    hidden[-1] = visible[-1]
    result = attend(query, paged, rows, visible, 64, 0.2, hidden)
    expected = dense(query, paged, rows, visible, 0.2, hidden)
    torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)
    assert not result[-1].any()


def test_pieces(monkeypatch):
    """Red when: sequences are lost or mixed up where their keys do not fit in one piece."""
    rows, lengths = [3, 0, 1, 7, 2], [20, 64, 1, 33, 50]
    paged = make_paged(lengths, 16, 2, 32, torch.float32, seed=1)
    query = torch.randn(13, 4, 32, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor(lengths).repeat_interleave(torch.tensor(rows))
    expected = dense(query, paged, rows, visible, 0.2)
    for values in (1, 2 * 50 * 64, 2**20):
        monkeypatch.setattr(reference, '_PIECE_VALUES', values)
        result = attend(query, paged, rows, visible, 64, 0.2)
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('poison', [float('nan'), float('inf'), 1e30], ids=str)
def test_stale_slots_do_not_matter(poison):
    """What a freed page still holds, a number or not, changes no bit of another sequence's output.

    Red when: hidden values are multiplied by a weight of zero: zero times NaN is NaN.
    """
    arguments = {'lengths': [20, 64], 'page_size': 16, 'heads': 2, 'size': 32, 'dtype': torch.float32, 'seed': 3}
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    outs = [attend(query, make_paged(**arguments, poison=content), [2, 1], torch.tensor([20, 7, 64]), 64, 0.2)
            for content in (0.0, poison)]
    assert outs[0].equal(outs[1])


@pytest.mark.parametrize('bound', [0, 7, 5000])
def test_max_kv_is_only_a_bound(bound):
    """Red when: a larger max_kv (the batch's longest text) changes what a row sees, or the page table is overrun."""
    paged = make_paged([20, 64], 16, 2, 32, torch.float32, seed=3)
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    visible = torch.tensor([20, 20, 40])
    tight = attend(query, paged, [2, 1], visible, 40, 0.2)
    torch.testing.assert_close(attend(query, paged, [2, 1], visible, 40 + bound, 0.2), tight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('rows', [[0, 0], [2, 0]])
def test_nothing_to_see(rows):
    """Red when: no rows, or none that sees a key, is an error or anything but 0."""
    paged = make_paged([20, 64], 16, 2, 32, torch.float32, seed=3)
    assert not attend(torch.ones(4, 4, 32), paged, rows, torch.zeros(4, dtype=torch.int64), 64, 0.2).any()


def test_work_is_the_tiles_in_order():
    """Red when: a tile is lost, rows of two sequences share one, or the last, partly filled one is left out."""
    tile = Tile(16, 32, 4, 1)
    work = attention_work(torch.tensor([0, 9, 9, 10, 14]), 4, 30, torch.float32)
    assert work.tile == tile and work.group == 4 and int(work.count) == 5
    assert work.tiles[:5].tolist() == [[0, 0, 0, 36], [0, 0, 16, 36], [0, 0, 32, 36], [2, 9, 0, 4], [3, 10, 0, 16]]
    again = attention_work(torch.tensor([0, 0, 0, 0, 1]), 4, 30, torch.float32, out=work)
    assert again is work and int(work.count) == 1 and work.tiles[0].tolist() == [3, 0, 0, 4]
