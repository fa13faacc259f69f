"""Twin of `plan`: all that lies between importance and the suffix, in plain torch."""
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .reference import budget, select

__all__ = ['Plan', 'plan']

# multipliers of a 32-bit multiply-and-shift hash
_MIX = (0x85EBCA6B, 0xC2B2AE35)


@dataclass
class Plan:
    """The rows that a step keeps, N of at most C = S * L, those of a sequence contiguous and in block order.

    Attributes:
        kept: [S] int64, bit i is set where block position i stays.
        rows: [C] int64, index of each kept row among the rows that entered; -1 beyond N.
        sequence, position, pages, offsets: [C] int64 of each kept row; -1 beyond N.
        masked: [C] bool, kept rows that wait for their token; False beyond N.
        q_start: [S + 1] int64, first kept row of each sequence; its last value is N.
        kv_len: [S] int64, keys that the kept rows see; 0 for a sequence without rows.
        rightmost: [S] int64, largest kept block position; -1 for a sequence without rows.
        candidates: [S, L] int64, index among the kept rows of a sequence's j-th masked one, -1 beyond the last.
        sampled: [C] int64, the same as one list of R rows; -1 beyond R.
        sampled_start: [S + 1] int64, place in that list of each sequence's first; its last value is R.
        total: [1] int32, N; may be pinned host memory.
    """
    kept: Tensor
    rows: Tensor
    sequence: Tensor
    position: Tensor
    pages: Tensor
    offsets: Tensor
    masked: Tensor
    q_start: Tensor
    kv_len: Tensor
    rightmost: Tensor
    candidates: Tensor
    sampled: Tensor
    sampled_start: Tensor
    total: Tensor

    @classmethod
    def empty(cls, sequences: int, length: int, device: torch.device | str) -> 'Plan':
        """Room for a plan of S sequences with blocks of L."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys((f.name for f in fields(cls)), (sequences * length,))
        shapes |= dict.fromkeys(('kept', 'kv_len', 'rightmost'), (sequences,))
        shapes |= dict.fromkeys(('q_start', 'sampled_start'), (sequences + 1,))
        shapes |= {'candidates': (sequences, length), 'total': (1,)}
        dtypes = {'masked': torch.bool, 'total': torch.int32}
        return cls(**{name: torch.empty(shape, dtype=dtypes.get(name, torch.int64), device=device)
                      for name, shape in shapes.items()})

    def copy_(self, other: 'Plan') -> 'Plan':
        """Take the values of `other`."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))
        return self


def plan(first: Tensor, second: Tensor, entering: Tensor, masked: Tensor, q_start: Tensor, history: Tensor,
         page_table: Tensor, page_size: int, progress: Tensor, decoded: Tensor, steps: Tensor, alpha: Tensor,
         keep: int | None = None, selection: str = 'top', sequential: int = 0, kv_visible: str = 'progress',
         out: Plan | None = None) -> Plan:
    """Budget, selection and compaction of a step (FOCUS, section 3.3 and 3.4, eq. 5).

    Maps are [S] int64, one bit a block position, L at most 64. A sequence may be empty (all bits 0): a padded batch.

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
        out: where to write.
    """
    sequences, kv_heads, length = first.shape
    place = torch.arange(length, device=first.device)
    entered, waiting = (((flags[:, None] >> place) & 1).bool() for flags in (entering, entering & masked))
    count = waiting.sum(1, keepdim=True)
    delta = torch.zeros_like(first[:, 0])
    before = torch.zeros_like(delta)
    for head in range(kv_heads):  # a fixed order: the same partial sums give the same delta in any batch
        delta, before = delta + second[:, head], before + first[:, head]
    delta = delta - before
    order = (~waiting).long().argsort(dim=1, stable=True)  # masked positions first
    positions = torch.where(place < count, order, -1)
    budgets = count[:, 0].clamp_max(keep) if keep is not None else budget(count[:, 0], decoded, steps, alpha)
    scores = {'top': lambda: delta, 'bottom': lambda: -delta, 'random': lambda: _noise(history, positions)}[selection]()
    stays = select(scores, positions, budgets, progress, paper_rules=selection == 'top' and keep is None)
    stays[:, :sequential] |= positions[:, :sequential] >= 0
    kept = (entered & ~waiting) | torch.zeros_like(waiting).scatter(1, order, stays)

    rightmost = torch.where(kept, place, -1).amax(1)
    last = rightmost if kv_visible == 'reference' else torch.maximum(rightmost, progress)
    kv_len = torch.where(kept.any(1), history + last + 1, 0)
    result = kept_rows(kept, entered, waiting, q_start, history, page_table, page_size, kv_len, rightmost)
    return result if out is None else out.copy_(result)


def kept_rows(kept: Tensor, entered: Tensor, waiting: Tensor, q_start: Tensor, history: Tensor, page_table: Tensor,
              page_size: int, kv_len: Tensor, rightmost: Tensor) -> Plan:
    """The plan of a kept set; all of them [S, L] bool."""
    sequences, length = kept.shape
    place = torch.arange(length, device=kept.device)
    sequence, position = kept.nonzero(as_tuple=True)
    text = history[sequence] + position
    sampled = waiting & kept
    ends, sampled_ends = kept.sum(1).cumsum(0), sampled.sum(1).cumsum(0)
    number = torch.where(kept, kept.flatten().cumsum(0).view_as(kept) - 1, -1)
    first = (~sampled).long().argsort(dim=1, stable=True)
    zero = ends.new_zeros(1)

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_full((kept.numel() - values.numel(),), -1)])

    return Plan(
        kept=(kept.long() << place).sum(1),
        rows=padded(q_start[sequence] + (entered.cumsum(1) - 1)[kept]),
        sequence=padded(sequence),
        position=padded(position),
        pages=padded(page_table[sequence, text // page_size].long()),
        offsets=padded(text % page_size),
        masked=padded(waiting[kept].long()) == 1,
        q_start=torch.cat([zero, ends]),
        kv_len=kv_len,
        rightmost=rightmost,
        candidates=torch.where(place < sampled.sum(1, keepdim=True), number.gather(1, first), -1),
        sampled=padded(number[sampled]),
        sampled_start=torch.cat([zero, sampled_ends]),
        total=kept.sum()[None].int(),
    )


def _noise(history: Tensor, positions: Tensor) -> Tensor:
    """Pseudo-random scores [S, L] of a token's place in the text and the number of masked tokens alone."""
    value = (history[:, None] + positions) * 64 + (positions >= 0).sum(1, keepdim=True)
    value = value & 0xFFFFFFFF
    for factor in _MIX:
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return (value ^ (value >> 16)).float()
