"""The rows that enter a step in two launches, without a word from the host; twin: `reference_enter.enter`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from .plan import COUNTS, rows_kernel
from .reference_enter import Entered

__all__ = ['Entered', 'enter']

_CACHES = ('delayed-neighbour', 'delayed', 'off')


@triton.jit
def _enter_kernel(masked, cached, uncached, history, progress, count, kept, counts, kv_len, rightmost,
                  LENGTH: tl.constexpr, BLOCK: tl.constexpr, OFF: tl.constexpr, FULL_COMMIT: tl.constexpr,
                  REFERENCE: tl.constexpr, COUNTED: tl.constexpr):
    """Which positions of a sequence enter, how many, and the keys that they see."""
    sequence, sequences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    waiting = tl.load(masked + sequence)
    enters = (((tl.load(uncached + sequence) >> place) & 1) != 0) & inside
    whole = tl.sum(enters.to(tl.int32), 0) == 0
    if OFF:
        whole = sequence >= 0
    if FULL_COMMIT:
        undone = (((waiting | tl.load(cached + sequence)) >> place) & 1) != 0
        whole = whole | (tl.sum((undone & inside).to(tl.int32), 0) == 0)
    enters = (enters | whole) & inside
    if COUNTED:
        enters = enters & (sequence < tl.load(count))
    number = tl.sum(enters.to(tl.int32), 0)
    right = tl.max(tl.where(enters, place, -1), 0)
    last = right if REFERENCE else tl.maximum(right, tl.load(progress + sequence))
    tl.store(kept + sequence, tl.sum(enters.to(tl.int64) << place, 0))
    tl.store(counts + sequence, number)
    tl.store(counts + sequences + sequence, tl.sum((enters & (((waiting >> place) & 1) != 0)).to(tl.int32), 0))
    tl.store(rightmost + sequence, right)
    tl.store(kv_len + sequence, tl.where(number > 0, tl.load(history + sequence) + last + 1, 0))


def enter(ids: Tensor, masked: Tensor, cached: Tensor, uncached: Tensor, history: Tensor, progress: Tensor,
          page_table: Tensor, page_size: int, cache: str = 'delayed-neighbour', full_commit: bool = False,
          kv_visible: str = 'progress', count: Tensor | None = None, out: Entered | None = None) -> Entered:
    """Which positions enter a step (FOCUS, section 3.5), and their rows.

    `importance` takes the result's `candidates`, `plan` its `kept` (as `entering`) and `q_start`, `settle` its `kept`
    (as `entering`).

    Args:
        ids: [S, L] int64, L at most 64.
        masked, cached, uncached: [S] int64 maps, of `settle.Blocks`.
        history, progress: [S] int64.
        page_table: [S, P] int64 or int32.
        page_size: G.
        cache: 'delayed-neighbour', 'delayed' or 'off'.
        full_commit: a finished block is run once more as a whole.
        kv_visible: 'progress' or 'reference'.
        count: [1] int32 or int64, number of sequences that are real; None for all. The others enter no row.
        out: where to write, of `Entered.empty`, apart from all other arguments.

    Raises:
        ValueError: an argument that the kernels cannot take, or an unknown option.
    """
    sequences, length = ids.shape
    if not 1 <= length <= 64:
        raise ValueError(f'ids.size(1)={length}: enter takes block lengths from 1 to 64')
    if cache not in _CACHES:
        raise ValueError(f'cache={cache!r} is not one of {", ".join(_CACHES)}')
    if kv_visible not in ('progress', 'reference'):
        raise ValueError(f'kv_visible={kv_visible!r} is not one of progress, reference')
    if page_size < 1:
        raise ValueError(f'page_size={page_size}: at least 1')
    if page_table.ndim != 2 or page_table.size(0) != sequences or page_table.stride(1) != 1 or (
            page_table.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f'page_table {tuple(page_table.shape)} of {page_table.dtype}: enter takes [{sequences}, P] of '
                         'int32 or int64, rows contiguous')
    if count is not None and (count.numel() != 1 or count.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f'count {tuple(count.shape)} of {count.dtype}: enter takes one int32 or int64')
    expect('ids', ids, (sequences, length), torch.int64)
    for name, tensor in {'masked': masked, 'cached': cached, 'uncached': uncached, 'history': history,
                         'progress': progress}.items():
        expect(name, tensor, (sequences,), torch.int64)
    if out is None:
        out = Entered.empty(sequences, length, ids.device)
    elif out.candidates.shape != (sequences, length):
        raise ValueError(f'out is of {tuple(out.candidates.shape)}: these rows are of {(sequences, length)}')
    if not sequences:
        for name in ('q_start', 'sampled_start', 'total'):
            getattr(out, name).zero_()
        return out
    counts = torch.empty((2, sequences), dtype=torch.int32, device=ids.device)
    block = triton.next_power_of_2(length)
    _enter_kernel[(sequences,)](
        masked, cached, uncached, history, progress, count, out.kept, counts, out.kv_len, out.rightmost, LENGTH=length,
        BLOCK=block, OFF=cache == 'off', FULL_COMMIT=full_commit, REFERENCE=kv_visible == 'reference',
        COUNTED=count is not None, num_warps=1)
    rows_kernel[(sequences,)](
        out.kept, counts, out.kept, masked, None, history, page_table, page_size, page_table.stride(0), out.rows,
        out.sequence, out.position, out.pages, out.offsets, out.masked, out.q_start, out.candidates, out.sampled,
        out.sampled_start, out.total, ids, out.input_ids, out.position_ids, LENGTH=length, BLOCK=block, COUNTS=COUNTS,
        ENTER=True, num_warps=2)
    return out
