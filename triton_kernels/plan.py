"""From importance to the suffix in two launches; twin: `reference_plan.plan` (FOCUS, section 3.3 and 3.4, eq. 5).

The first decides, one program a sequence, on lanes that are block positions. The second, one program a sequence again,
knows how many rows each sequence keeps and gives every row its place; no program waits for another.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ._arguments import expect
from .reference_plan import Plan

__all__ = ['Plan', 'plan']

_RANKINGS = {'top': 0, 'bottom': 1, 'random': 2}
# counts that a program adds up at a time; one pass for every batch that serving sees
COUNTS = 512


@triton.jit
def _noise(history, place, count):
    """The twin's pseudo-random scores: two rounds of a 32-bit hash, in 64 bits."""
    value = ((history + place) * 64 + count) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (value ^ (value >> 16)).to(tl.float32)


@triton.jit
def _budget(count, decoded, steps, alpha):
    """K by eq. 5, with the twin's slack: float64 throughout."""
    mean = decoded.to(tl.float64) / tl.maximum(steps, 1).to(tl.float64)
    mean = tl.maximum(tl.where(steps > 0, mean, 1.0), 1.0)
    slack = tl.full([], 1e-7, tl.float64)
    return tl.minimum(count, tl.maximum(tl.ceil(mean * alpha - slack).to(tl.int64), 1))


@triton.jit
def _keep_kernel(first, second, entering, masked, history, progress, decoded, steps, alpha, keep, kept, counts, kv_len,
                 rightmost, KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
                 RANKING: tl.constexpr, FIXED: tl.constexpr, SEQUENTIAL: tl.constexpr, REFERENCE: tl.constexpr):
    """Which positions of a sequence stay, how many, and the keys that they see."""
    sequence, sequences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    entered = tl.load(entering + sequence)
    waiting = tl.load(masked + sequence) & entered
    past, done = tl.load(history + sequence), tl.load(progress + sequence)
    valid = (((waiting >> place) & 1) != 0) & inside
    count = tl.sum(valid.to(tl.int64), 0)
    nth = tl.cumsum(valid.to(tl.int32), 0) - 1

    delta = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.float32)
    for head in tl.static_range(KV_HEADS):  # a fixed order: the same partial sums give the same delta in any batch
        at = (sequence * KV_HEADS + head) * LENGTH + nth
        delta += tl.load(second + at, mask=valid, other=0.0)
        before += tl.load(first + at, mask=valid, other=0.0)
    delta = delta - before
    if RANKING == 1:
        delta = -delta
    if RANKING == 2:
        delta = _noise(past, place, count)
    budget = tl.minimum(count, keep)
    if not FIXED:
        budget = _budget(count, tl.load(decoded + sequence), tl.load(steps + sequence), tl.load(alpha + sequence))

    ranked = tl.where(valid, delta, float('-inf'))
    better = (ranked[None, :] > ranked[:, None]) | ((ranked[None, :] == ranked[:, None])
                                                    & (place[None, :] < place[:, None]))
    rank = tl.sum((better & valid[None, :]).to(tl.int32), 1)
    base = valid & (rank < budget)
    stays = base
    if RANKING == 0 and not FIXED:
        number = tl.maximum(count, 1).to(tl.float64)
        values = tl.where(valid, delta, 0.0).to(tl.float64)
        mean = tl.sum(values, 0) / number
        error = tl.where(valid, values - mean, 0.0)
        deviation = tl.sqrt(tl.sum(error * error, 0) / number)
        likely = valid & (values >= mean + deviation)
        enough = tl.sum(likely.to(tl.int64), 0) >= budget
        base = (enough & likely) | ((enough == 0) & base)
        bits = tl.sum(base.to(tl.int64) << place, 0)
        # the sign that the shift copies is position 63's own bit
        stays = base | (((((bits >> 1) & waiting) >> place) & 1) != 0) & valid
    right = tl.max(tl.where(stays, place, -1), 0)
    stays = stays | (valid & (place < right) & (place > done))
    # K is at least 1 and all of at most K tokens rank within it: neither case needs a rule of its own
    stays = stays | (valid & (nth < SEQUENTIAL))
    stays = stays | ((((entered & ~waiting) >> place) & 1) != 0) & inside

    number = tl.sum(stays.to(tl.int32), 0)
    right = tl.max(tl.where(stays, place, -1), 0)
    last = right if REFERENCE else tl.maximum(right, done)
    tl.store(kept + sequence, tl.sum(stays.to(tl.int64) << place, 0))
    tl.store(counts + sequence, number)
    tl.store(counts + sequences + sequence, tl.sum((stays & valid).to(tl.int32), 0))
    tl.store(rightmost + sequence, right)
    tl.store(kv_len + sequence, tl.where(number > 0, past + last + 1, 0))


@triton.jit
def _totals(counts, sequence, sequences, COUNTS: tl.constexpr):
    """Sum of the counts before a sequence, and of all."""
    before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for start in range(0, sequences, COUNTS):
        index = start + tl.arange(0, COUNTS)
        number = tl.load(counts + index, mask=index < sequences, other=0)
        before += tl.sum(tl.where(index < sequence, number, 0), 0)
        total += tl.sum(number, 0)
    return before.to(tl.int64), total.to(tl.int64)


@triton.jit
def rows_kernel(kept, counts, entering, masked, q_start, history, page_table, page_size, pages_row, rows, sequence_of,
                position_of, pages, offsets, waits, new_start, candidates, sampled, sampled_start, total, ids,
                input_ids, position_ids, LENGTH: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
                ENTER: tl.constexpr):
    """The rows of a sequence, each at its place; its L - n unused places lie beyond N and are marked.

    With ENTER these are the rows that enter the step: numbered by themselves, and with their tokens.
    """
    sequence, sequences = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    before, number = _totals(counts, sequence, sequences, COUNTS)
    samples_before, samples = _totals(counts + sequences, sequence, sequences, COUNTS)
    if sequence == 0:
        tl.store(total, number.to(tl.int32))
        tl.store(new_start + sequences, number)
        tl.store(sampled_start + sequences, samples)
    tl.store(new_start + sequence, before)
    tl.store(sampled_start + sequence, samples_before)

    place = tl.arange(0, BLOCK).to(tl.int64)
    inside = place < LENGTH
    bits, waiting, entered = tl.load(kept + sequence), tl.load(masked + sequence), tl.load(entering + sequence)
    stays = (((bits >> place) & 1) != 0) & inside
    chosen = ((((bits & waiting) >> place) & 1) != 0) & inside
    nth = tl.cumsum(stays.to(tl.int64), 0) - 1
    parent = tl.cumsum(((((entered >> place) & 1) != 0) & inside).to(tl.int64), 0) - 1
    unused = sequence * LENGTH - before + place - nth - 1
    at = tl.where(stays, before + nth, number + unused)
    text = tl.load(history + sequence) + place
    page = tl.load(page_table + sequence * pages_row + text // page_size, mask=stays, other=-1).to(tl.int64)
    parent += before if ENTER else tl.load(q_start + sequence)
    tl.store(rows + at, tl.where(stays, parent, -1), mask=inside)
    tl.store(sequence_of + at, tl.where(stays, sequence, -1), mask=inside)
    tl.store(position_of + at, tl.where(stays, place, -1), mask=inside)
    tl.store(pages + at, page, mask=inside)
    tl.store(offsets + at, tl.where(stays, text % page_size, -1), mask=inside)
    tl.store(waits + at, chosen, mask=inside)
    if ENTER:
        token = tl.load(ids + sequence * LENGTH + place, mask=stays, other=0)
        tl.store(input_ids + at, token, mask=inside)
        tl.store(position_ids + at, tl.where(stays, text, 0), mask=inside)

    own = tl.sum(chosen.to(tl.int64), 0)
    nth = tl.cumsum(chosen.to(tl.int64), 0) - 1
    row = tl.where(chosen, at, -1)
    tl.store(candidates + sequence * LENGTH + tl.where(chosen, nth, own + place - nth - 1), row, mask=inside)
    unused = sequence * LENGTH - samples_before + place - nth - 1
    tl.store(sampled + tl.where(chosen, samples_before + nth, samples + unused), row, mask=inside)


def plan(first: Tensor, second: Tensor, entering: Tensor, masked: Tensor, q_start: Tensor, history: Tensor,
         page_table: Tensor, page_size: int, progress: Tensor, decoded: Tensor, steps: Tensor, alpha: Tensor,
         keep: int | None = None, selection: str = 'top', sequential: int = 0, kv_visible: str = 'progress',
         out: Plan | None = None) -> Plan:
    """Budget, selection and compaction of a step (FOCUS, section 3.3 and 3.4, eq. 5).

    Maps are [S] int64, one bit a block position, L at most 64. A sequence may be empty (all bits 0): a padded batch.
    A sequence's kept set depends on its own values alone.

    Args:
        first, second: [S, Hkv, L] float32, partial importance in layers 0 and 1 of the j-th masked token.
        entering: map of the positions that entered the step.
        masked: map of the positions that wait for their token; those that did not enter are left out.
        q_start: [S + 1] int64, first entered row of each sequence.
        history: [S] int64, tokens before the block.
        page_table: [S, P] int64 or int32.
        page_size: G.
        progress, decoded, steps: [S] int64, of the state before the step.
        alpha: [S] float64, factor of the budget, at least 1.
        keep: a fixed budget instead of alpha's, which also leaves out the paper's two rules on the ranking.
        selection: 'top' is the paper's; 'bottom' and 'random' are its ablations.
        sequential: the next this many masked positions are always kept (sequential unmasking).
        kv_visible: 'progress' or 'reference'.
        out: where to write, of `Plan.empty`, apart from all other arguments; its `total` may be pinned host memory.

    Raises:
        ValueError: an argument that the kernels cannot take, or an unknown option.
    """
    sequences, kv_heads, length = first.shape
    _validate(first, second, sequences, length, page_table, page_size, keep, selection, sequential, kv_visible)
    expect('q_start', q_start, (sequences + 1,), torch.int64)
    expect('alpha', alpha, (sequences,), torch.float64)
    for name, tensor in {'entering': entering, 'masked': masked, 'history': history, 'progress': progress,
                         'decoded': decoded, 'steps': steps}.items():
        expect(name, tensor, (sequences,), torch.int64)
    if out is None:
        out = Plan.empty(sequences, length, first.device)
    elif out.candidates.shape != (sequences, length):
        raise ValueError(f'out is a plan of {tuple(out.candidates.shape)}: this one is of {(sequences, length)}')
    if not sequences:
        for name in ('q_start', 'sampled_start', 'total'):
            getattr(out, name).zero_()
        return out
    counts = torch.empty((2, sequences), dtype=torch.int32, device=first.device)
    block = triton.next_power_of_2(length)
    _keep_kernel[(sequences,)](
        first, second, entering, masked, history, progress, decoded, steps, alpha, length if keep is None else keep,
        out.kept, counts, out.kv_len, out.rightmost, KV_HEADS=kv_heads, LENGTH=length, BLOCK=block,
        RANKING=_RANKINGS[selection], FIXED=keep is not None, SEQUENTIAL=sequential,
        REFERENCE=kv_visible == 'reference', num_warps=4 if length > 16 else 1)
    rows_kernel[(sequences,)](
        out.kept, counts, entering, masked, q_start, history, page_table, page_size, page_table.stride(0), out.rows,
        out.sequence, out.position, out.pages, out.offsets, out.masked, out.q_start, out.candidates, out.sampled,
        out.sampled_start, out.total, None, None, None, LENGTH=length, BLOCK=block, COUNTS=COUNTS, ENTER=False,
        num_warps=2)
    return out


def _validate(first: Tensor, second: Tensor, sequences: int, length: int, page_table: Tensor, page_size: int,
              keep: int | None, selection: str, sequential: int, kv_visible: str) -> None:
    """Shapes of the tensors with more than one axis, and the options."""
    if not 1 <= length <= 64:
        raise ValueError(f'first.size(2)={length}: plan takes block lengths from 1 to 64')
    for name, partial in {'first': first, 'second': second}.items():
        expect(name, partial, (sequences, first.size(1), length), torch.float32)
    if page_table.ndim != 2 or page_table.size(0) != sequences or page_table.stride(1) != 1 or (
            page_table.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f'page_table {tuple(page_table.shape)} of {page_table.dtype}: plan takes [{sequences}, P] of '
                         'int32 or int64, rows contiguous')
    if page_size < 1:
        raise ValueError(f'page_size={page_size}: at least 1')
    if keep is not None and keep < 1:
        raise ValueError(f'keep={keep}: at least 1')
    if selection not in _RANKINGS:
        raise ValueError(f'selection={selection!r} is not one of {", ".join(_RANKINGS)}')
    if sequential < 0:
        raise ValueError(f'sequential={sequential}: at least 0')
    if kv_visible not in ('progress', 'reference'):
        raise ValueError(f'kv_visible={kv_visible!r} is not one of progress, reference')
