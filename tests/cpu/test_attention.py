"""The CPU attention against a dense fp32 oracle.

The cache is NaN wherever no token of the batch lies, so a key read from another sequence's page, from a page's unused
end or from the table's padding shows in the result.
"""
from types import SimpleNamespace

import pytest
import torch
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec

from lmdeploy_focus.cpu import attention
from lmdeploy_focus.cpu.attention import CpuAttentionImpl, CpuAttentionMetadata, attend, gather_pages

HEAD_DIM = 8
V_HEAD_DIM = 4


def build_spec(num_heads, num_kv_heads, **changes):
    fields = {
        'num_heads': num_heads, 'num_kv_heads': num_kv_heads, 'head_dim': HEAD_DIM, 'v_head_dim': V_HEAD_DIM,
        'scale': 0.3, 'causal': True, 'block_sparse_size': 1, 'alibi': False, 'sliding_window': None,
        'logit_softcapping': 0.0, 'use_flash_mla': False, 'mla_index_topk': None, 'learnable_sink': False,
    }
    return PagedAttentionBuildSpec(**fields | changes)


class Batch:
    """Sequences with random contents in a paged cache whose pages are dealt out at random."""

    def __init__(self, q_lens, kv_lens, page_size, num_heads, num_kv_heads, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.q_lens, self.kv_lens, self.page_size = q_lens, kv_lens, page_size
        self.keys = [randn(n, num_kv_heads, HEAD_DIM) for n in kv_lens]
        self.values = [randn(n, num_kv_heads, V_HEAD_DIM) for n in kv_lens]
        self.query = randn(sum(q_lens), num_heads, HEAD_DIM)
        needed = [-(-n // page_size) for n in kv_lens]
        order = torch.randperm(sum(needed) + 3, generator=generator)
        # Page 0 pads the table, as in LMDeploy, and belongs to no sequence; it stays NaN.
        order = order[order != 0]
        self.table = torch.zeros(len(q_lens), max(needed), dtype=torch.int32)
        self.k_cache = torch.full((sum(needed) + 3, page_size, num_kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
        self.v_cache = torch.full((sum(needed) + 3, page_size, num_kv_heads, V_HEAD_DIM), torch.nan, dtype=dtype)
        for row, count in enumerate(needed):
            self.table[row, :count] = order[:count]
            order = order[count:]
            for position in range(kv_lens[row] - q_lens[row]):
                slot = self.table[row, position // page_size], position % page_size
                self.k_cache[slot], self.v_cache[slot] = self.keys[row][position], self.values[row][position]

    def metadata(self):
        q_seqlens = torch.tensor(self.q_lens)
        return CpuAttentionMetadata.from_step_context(
            SimpleNamespace(q_seqlens=q_seqlens, kv_seqlens=torch.tensor(self.kv_lens), block_offsets=self.table,
                            q_start_loc=q_seqlens.cumsum(0) - q_seqlens, is_decoding=False, kv_quant_policy=0,
                            cache_config=SimpleNamespace(kernel_block_size=self.page_size)))

    def run(self, impl):
        new_keys = torch.cat([k[len(k) - q:] for k, q in zip(self.keys, self.q_lens, strict=True)])
        new_values = torch.cat([v[len(v) - q:] for v, q in zip(self.values, self.q_lens, strict=True)])
        return impl.forward(self.query, new_keys, new_values, self.k_cache, self.v_cache, self.metadata())

    def oracle(self, sees):
        """One row, one head at a time, in fp32; `sees(position, key, kv_len)` says whether a row sees a key."""
        num_heads = self.query.size(1)
        out = torch.empty(self.query.size(0), num_heads, V_HEAD_DIM)
        row = 0
        for keys, values, q_len, kv_len in zip(self.keys, self.values, self.q_lens, self.kv_lens, strict=True):
            for position in range(kv_len - q_len, kv_len):
                seen = [key for key in range(kv_len) if sees(position, key, kv_len)]
                for head in range(num_heads):
                    shared = head * keys.size(1) // num_heads
                    scores = keys[seen, shared].float() @ self.query[row, head].float() * 0.3
                    out[row, head] = scores.softmax(0) @ values[seen, shared].float()
                row += 1
        return out


def causal(position, key, kv_len):
    return key <= position


def block_causal(block):
    return lambda position, key, kv_len: key // block <= position // block


def lengths(num_seqs, page_size, q_len=None, multiple=1):
    """Lengths around page edges, in an order that mixes them; query lengths are ragged if `q_len` is None."""
    edges = [page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1, 1, page_size // 2]
    kv_lens = [-(-max(edges[i % 7], q_len or 1) // multiple) * multiple for i in range(num_seqs)]
    if q_len is not None:
        return [q_len] * num_seqs, kv_lens
    # From the whole sequence (a first prefill) to its last row.
    ragged = [max(multiple, n * (3 - i % 3) // 3 // multiple * multiple) for i, n in enumerate(kv_lens)]
    return ragged, kv_lens


@pytest.mark.parametrize('page_size', [16, 64])
@pytest.mark.parametrize('num_seqs', [1, 3, 17])
@pytest.mark.parametrize('num_heads,num_kv_heads', [(4, 2), (3, 3), (6, 1)])
class TestAgainstOracle:
    """Red when: a slot is computed wrongly, padding is read, heads are grouped in another order, a mask is off by one,
    or the result of one sequence lands in the rows of another."""

    @pytest.mark.parametrize('q_len', [1, 5, None])
    def test_causal(self, page_size, num_seqs, num_heads, num_kv_heads, q_len):
        batch = Batch(*lengths(num_seqs, page_size, q_len), page_size, num_heads, num_kv_heads)
        out = batch.run(CpuAttentionImpl(build_spec(num_heads, num_kv_heads)))
        torch.testing.assert_close(out, batch.oracle(causal), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize('q_len', [8, None])
    def test_block_causal(self, page_size, num_seqs, num_heads, num_kv_heads, q_len):
        batch = Batch(*lengths(num_seqs, page_size, q_len, multiple=8), page_size, num_heads, num_kv_heads)
        out = batch.run(CpuAttentionImpl(build_spec(num_heads, num_kv_heads, block_sparse_size=8)))
        torch.testing.assert_close(out, batch.oracle(block_causal(8)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('q_lens,kv_lens', [([5, 3], [13, 3]), ([5, 5, 5], [13, 29, 5])])
def test_block_that_is_cut_off_by_the_end_of_the_sequence(q_lens, kv_lens):
    """Red when a row of an unfinished block sees keys behind the sequence's end."""
    batch = Batch(q_lens, kv_lens, 16, 4, 2)
    out = batch.run(CpuAttentionImpl(build_spec(4, 2, block_sparse_size=8)))
    torch.testing.assert_close(out, batch.oracle(block_causal(8)), rtol=1e-5, atol=1e-5)


def test_without_a_mask():
    """Red when a model that is not causal gets a causal mask."""
    batch = Batch([5, 3], [13, 3], 16, 4, 2)
    out = batch.run(CpuAttentionImpl(build_spec(4, 2, causal=False)))
    torch.testing.assert_close(out, batch.oracle(lambda *_: True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('max_scores', [1, 64, 4096])
@pytest.mark.parametrize('q_lens', [[30], [30, 17], [17, 17, 17]])
def test_chunks_of_rows_change_nothing(monkeypatch, max_scores, q_lens):
    """Red when a chunk of a long prompt starts at the wrong row or loses keys that it sees."""
    monkeypatch.setattr(attention, 'MAX_SCORES', max_scores)
    batch = Batch(q_lens, [33] * len(q_lens), 16, 4, 2)
    for block, sees in ((1, causal), (8, block_causal(8))):
        out = batch.run(CpuAttentionImpl(build_spec(4, 2, block_sparse_size=block)))
        torch.testing.assert_close(out, batch.oracle(sees), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('q_lens', [[8, 8], [8, 3]])
def test_bf16_is_computed_in_fp32(q_lens):
    """Red when scores or sums are bf16: the result must be the fp32 oracle's, rounded once (to a bit in the last place
    where fp32's own rounding decides)."""
    batch = Batch(q_lens, [128, 40], 16, 4, 2, dtype=torch.bfloat16)
    out = batch.run(CpuAttentionImpl(build_spec(4, 2)))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, batch.oracle(causal).bfloat16(), rtol=2**-7, atol=1e-6)


def test_only_its_own_slots_are_written():
    """Red when a write goes anywhere but to the new rows' slots."""
    batch = Batch([3, 1], [17, 16], 16, 4, 2)
    batch.run(CpuAttentionImpl(build_spec(4, 2)))
    for cache, contents in ((batch.k_cache, batch.keys), (batch.v_cache, batch.values)):
        for pages, rows in zip(batch.table, contents, strict=True):
            assert torch.equal(gather_pages(cache, pages, len(rows)), rows)
        assert int(cache[..., 0, 0].isfinite().sum()) == 17 + 16


def test_a_layer_without_keys_reads_the_cache_only():
    """Red when a layer that shares the cache of another writes to it."""
    batch = Batch([3, 1], [17, 16], 16, 4, 2)
    impl = CpuAttentionImpl(build_spec(4, 2))
    expected = batch.run(impl)
    before = batch.k_cache.clone()
    out = impl.forward(batch.query, None, None, batch.k_cache, batch.v_cache, batch.metadata())
    assert torch.equal(out, expected)
    assert torch.equal(batch.k_cache.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize('length', [1, 15, 16, 17, 48])
def test_gather_pages(length):
    """Red when pages come in the table's wrong order or the length is rounded to pages."""
    cache = torch.arange(5 * 16).view(5, 16, 1, 1)
    table = torch.tensor([4, 0, 2, 0])
    expected = [int(table[i // 16]) * 16 + i % 16 for i in range(length)]
    assert gather_pages(cache, table, length).flatten().tolist() == expected


def test_attend_hides_keys_of_each_row():
    """Red when `visible` is taken for the sequence instead of the row."""
    query, key = torch.ones(2, 3, 2, 4), torch.ones(2, 6, 1, 4)
    value = torch.arange(6.).view(1, 6, 1, 1).expand(2, -1, -1, -1)
    visible = torch.tensor([[1, 2, 6], [3, 3, 1]])
    out = attend(query, key, value, visible, scale=1.0)
    expected = (visible - 1).float() / 2
    torch.testing.assert_close(out, expected[:, :, None, None].expand(2, 3, 2, 1))


@pytest.mark.parametrize('change', [{'logit_softcapping': 30.0}, {'alibi': True}, {'use_flash_mla': True},
                                    {'mla_index_topk': 64}, {'learnable_sink': True}])
def test_what_there_is_no_code_for_is_refused(change):
    """Red when an attention that would be computed wrongly is built."""
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f'{name}={value}'):
        CpuAttentionImpl(build_spec(4, 2, **change))


@pytest.mark.parametrize('no_window', [None, -1, 0, (-1, -1)])
def test_no_sliding_window(no_window):
    """Red when one of the ways to say that there is no window counts as one."""
    batch = Batch([5, 3], [37, 3], 16, 4, 2)
    out = batch.run(CpuAttentionImpl(build_spec(4, 2, sliding_window=no_window)))
    torch.testing.assert_close(out, batch.oracle(causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('max_scores', [64, 1 << 24])
@pytest.mark.parametrize('window', [1, 7, 16, (64, 64)])
@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('q_lens,kv_lens', [([5, 3], [37, 3]), ([8, 8, 8], [8, 33, 16]), ([1, 1], [20, 5])])
def test_sliding_window(monkeypatch, q_lens, kv_lens, is_causal, window, max_scores):
    """Red when the window is a key too long or too short, ends elsewhere than at the row, or is lost in a chunk or in a
    batch of equal lengths."""
    monkeypatch.setattr(attention, 'MAX_SCORES', max_scores)
    batch = Batch(q_lens, kv_lens, 16, 4, 2)
    width = window[0] if isinstance(window, tuple) else window
    out = batch.run(CpuAttentionImpl(build_spec(4, 2, sliding_window=window, causal=is_causal)))
    expected = batch.oracle(lambda position, key, _: key > position - width and (key <= position or not is_causal))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
