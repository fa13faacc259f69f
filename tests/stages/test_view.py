"""FocusView, its candidates and its compaction: rows in order, slots where the positions say."""
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from lmdeploy_focus.stages import compact
from lmdeploy_focus.stages.prefix import Queries
from lmdeploy_focus.stages.view import MASKED, FocusView, entering_view

ROWS = ('sequence', 'position', 'input_ids', 'position_ids', 'masked', 'pages', 'offsets')


@st.composite
def views(draw):
    """A view, and the ids, mask, entering flags and page table behind it; histories not aligned to anything."""
    length = draw(st.sampled_from((4, 8, 16, 32, 64)))
    sequences = draw(st.sampled_from((1, 3, 17)))
    page_size = draw(st.sampled_from((4, 16, 64)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.integers(0, 2, size=(sequences, length))
    mask[random.random(sequences) < .3] = random.integers(0, 2)
    entering = (mask == MASKED) | (random.random((sequences, length)) < random.random())
    entering[~entering.any(1), random.integers(length)] = True
    history = random.integers(0, 200, size=sequences)
    columns = (200 + length) // page_size + 1
    pages = random.permutation(sequences * columns).reshape(sequences, columns)
    ids = random.integers(0, 1000, size=(sequences, length))
    ids, entering, history, pages = (torch.from_numpy(array) for array in (ids, entering, history, pages))
    mask = torch.from_numpy(mask).to(torch.uint8)
    view = entering_view(ids, entering, mask, history, pages, page_size, history + length, int(history.max()) + length)
    return view, ids, mask, entering, page_size


def check(view: FocusView, ids, mask, entering, page_size) -> None:
    """Every field of `view` against a loop over the positions that are in it."""
    expected = {name: [] for name in ROWS}
    starts, rightmost = [0], []
    for s, flags in enumerate(entering.tolist()):
        inside = [p for p, flag in enumerate(flags) if flag]
        for p in inside:
            place = int(view.history[s]) + p
            for name, value in zip(ROWS, (s, p, int(ids[s, p]), place, bool(mask[s, p] == MASKED),
                                          int(view.page_table[s, place // page_size]), place % page_size), strict=True):
                expected[name].append(value)
        starts.append(len(expected['position']))
        rightmost.append(inside[-1])
    for name in ROWS:
        assert getattr(view, name).tolist() == expected[name], name
        assert getattr(view, name).dtype == (torch.bool if name == 'masked' else torch.int64)
    assert view.q_start.tolist() == starts
    assert view.rightmost().tolist() == rightmost
    assert view.rows_per_sequence().tolist() == [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert (view.num_sequences, view.num_rows) == (len(ids), starts[-1])


EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


@EXAMPLES
@given(views())
def test_rows_and_slots(case):
    """Red when: rows leave block order or their sequence, q_start is off by one, or a page is looked up by block
    position, by kv_len or in another sequence's table."""
    check(*case)


@EXAMPLES
@given(views())
def test_candidates(case):
    """Red when: a row that is not masked becomes a candidate, a sequence's list starts at another's, or the padding
    overwrites the last candidate."""
    view, _, mask, _, _ = case
    rows, positions = view.candidates()
    for s in range(view.num_sequences):
        masked = [p for p, m in enumerate(mask[s].tolist()) if m == MASKED]
        assert positions[s].tolist() == masked + [-1] * (view.block_length - len(masked))
        own = rows[s][rows[s] >= 0]
        assert rows[s, len(masked):].eq(-1).all()
        assert view.position[own].tolist() == masked and view.sequence[own].eq(s).all()


@EXAMPLES
@given(views(), st.integers(0, 2**32 - 1))
def test_take_is_the_view_of_the_kept_rows(case, seed):
    """Taking rows equals building the view of those rows. Red when: q_start counts rows before eviction, or a field of
    the rows is forgotten."""
    view, ids, mask, entering, page_size = case
    keep = torch.from_numpy(np.random.default_rng(seed).random(view.num_rows) < .5)
    keep[view.q_start[1:] - 1] = True
    seen = view.kv_len - 1
    kept, index = compact.take(view, keep, seen)
    assert index.tolist() == [row for row, stays in enumerate(keep.tolist()) if stays]
    assert kept.kv_len is seen
    smaller = torch.zeros_like(entering)
    smaller[view.sequence[keep], view.position[keep]] = True
    check(kept, ids, mask, smaller, page_size)


@EXAMPLES
@given(views())
def test_take_all_is_the_identity(case):
    """Red when: compaction reorders or drops rows where nothing is evicted."""
    view = case[0]
    kept, index = compact.take(view, torch.ones(view.num_rows, dtype=torch.bool), view.kv_len)
    assert index.tolist() == list(range(view.num_rows))
    for name in (*ROWS, 'q_start', 'kv_len', 'history', 'page_table'):
        assert getattr(kept, name).equal(getattr(view, name)), name


def test_take_queries():
    """Queries, residual and rotary tables follow their rows. Red when: one of them keeps the order before eviction."""
    query, key, residual, cos, sin = (torch.arange(5.).view(5, 1, 1) + 100 * i for i in range(5))
    kept = torch.tensor([0, 3, 4])
    queries, rotary = compact.take_queries(Queries(query, key, residual.view(1, 5, 1), .5), (cos, sin), kept)
    assert queries.query.flatten().tolist() == [0, 3, 4]
    assert queries.residual.flatten().tolist() == [200, 203, 204] and queries.residual.shape == (1, 3, 1)
    assert [table.flatten().tolist() for table in rotary] == [[300, 303, 304], [400, 403, 404]]
    assert queries.scale == .5
