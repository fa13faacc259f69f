"""FOCUS once more, slowly: one sequence at a time, plain Python, exact where the paper's text is exact.

Written from the semantics, independently of `lmdeploy_focus/stages` and `triton_kernels`, and the golden model of their
tests. Ranking and thresholds are decided in exact arithmetic; attention and importance are float64.
"""
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

MASKED, UNMASKED, CACHED = 0, 1, 2


def importance(query: Tensor, key: Tensor, scale: float) -> list[float]:
    """Importance of the n masked tokens of one block (FOCUS, eq. 3 and 4), float64.

    Args:
        query: [n, H, D], key: [n, Hkv, D], of the masked tokens in block order.
        scale: factor of the scores.
    """
    count, heads, _ = query.shape
    group = heads // key.size(1)
    received = torch.zeros(count, dtype=torch.float64)
    for head in range(heads):
        scores = query[:, head].double() @ key[:, head // group].double().T * scale
        pooled = torch.empty_like(scores)
        for j in range(count):
            pooled[:, j] = scores[:, max(0, j - 1):j + 2].amax(1)
        received += pooled.softmax(1).sum(0)
    return received.tolist()


def budget(masked: int, decoded: int, steps: int, alpha: Fraction) -> int:
    """How many masked tokens may stay (FOCUS, eq. 5); the ceiling is that of the reals, hence the fractions."""
    mean = max(Fraction(1), Fraction(decoded, steps)) if steps else Fraction(1)
    return min(masked, math.ceil(alpha * mean))


def stands_out(delta: Sequence[float]) -> list[bool]:
    """{j : delta_j >= mean + population deviation}, without rounding.

    With x = delta_j, n x - sum >= 0 and (n x - sum)^2 >= n sum(x^2) - sum^2 is the same without a division or a root.
    """
    exact = [Fraction(value) for value in delta]
    common = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * common) for value in exact]
    count, total = len(whole), sum(whole)
    variance = count * sum(value * value for value in whole) - total * total
    return [count * value >= total and (count * value - total)**2 >= variance for value in whole]


def select(delta: Sequence[float], positions: Sequence[int], allowed: int, progress: int,
           paper_rules: bool = True) -> list[bool]:
    """Which masked tokens stay (FOCUS, section 3.3).

    Args:
        delta: ranking of the n masked tokens.
        positions: their block positions, ascending.
        allowed: the budget.
        progress: rightmost position that has been through all layers, -1 if none.
        paper_rules: with the deviation threshold and the left-neighbour rule.
    """
    count = len(positions)
    if count <= allowed:
        return [True] * count
    chosen = {j for j, likely in enumerate(stands_out(delta)) if likely} if paper_rules else set()
    if len(chosen) < allowed:
        chosen = set(sorted(range(count), key=lambda j: (-delta[j], positions[j]))[:allowed])
    if paper_rules:
        by_position = {position: j for j, position in enumerate(positions)}
        chosen |= {by_position[positions[j] - 1] for j in chosen if positions[j] - 1 in by_position}
    if not chosen:
        chosen = set(range(count))
    rightmost = max(positions[j] for j in chosen)
    return [j in chosen or progress < positions[j] < rightmost for j in range(count)]


def visible(history: int, rightmost: int, progress: int, rule: str) -> int:
    """Keys that the rows of a sequence see."""
    return history + 1 + (rightmost if rule == 'reference' else max(rightmost, progress))


class Block:
    """What one sequence remembers within one block.

    Attributes:
        frozen: positions whose KV is final.
        progress, decoded, steps: as in :class:`lmdeploy_focus.stages.state.FocusState`.
    """

    def __init__(self, length: int, rule: str = 'delayed-neighbour', progress: int = -1) -> None:
        self.length = length
        self.rule = rule
        self.frozen: set[int] = set()
        self.progress = progress
        self.decoded = 0
        self.steps = 0

    def uncached(self) -> list[int]:
        """Positions that are not final yet."""
        return [p for p in range(self.length) if p not in self.frozen]

    def entering(self, mask: Sequence[int], full_commit: bool = False) -> list[int]:
        """Positions that enter the step."""
        if self.rule == 'off' or (full_commit and all(m == UNMASKED for m in mask)):
            return list(range(self.length))
        return self.uncached() or list(range(self.length))

    def advance(self, mask_in: Sequence[int], mask_out: Sequence[int], rightmost: int) -> None:
        """End a step in which `rightmost` was the largest position that ran all layers."""
        for p in range(self.length):
            last = p == self.length - 1
            final = mask_in[p] != MASKED and (self.rule == 'delayed' or last or mask_in[p + 1] != MASKED)
            if final and self.rule != 'off':
                self.frozen.add(p)
        self.progress = max(self.progress, rightmost)
        newly = sum(before == MASKED and after == UNMASKED for before, after in zip(mask_in, mask_out, strict=True))
        self.decoded += newly
        self.steps += newly > 0


def unmask(ids: Sequence[int], mask: Sequence[int], sampled: Mapping[int, tuple[int, float]], strategy: str,
           threshold: float, per_step: int) -> tuple[list[int], list[int]]:
    """Accept tokens in one block.

    Args:
        ids, mask: of the L positions.
        sampled: position -> (token, confidence); NaN ranks below every number and never reaches a threshold.
        strategy: as the option dllm_unmasking_strategy.
        threshold: of the dynamic strategy.
        per_step: positions a step of the others.
    """
    new_ids, new_mask = list(ids), list(mask)
    if all(m == UNMASKED for m in mask):
        return new_ids, [CACHED] * len(new_mask)
    waiting = [p for p, m in enumerate(mask) if m == MASKED]
    score = {p: -math.inf if math.isnan(own) else own for p, (_, own) in sampled.items()}
    ranked = sorted((p for p in waiting if p in sampled), key=lambda p: (-score[p], p))
    if strategy == 'low_confidence_dynamic':
        accepted = {p for p in ranked if score[p] >= threshold} | set(ranked[:1])
    elif strategy == 'low_confidence_static':
        accepted = set(ranked[:per_step])
    else:
        accepted = set(waiting[:per_step]) & set(ranked)
    for p in accepted:
        new_ids[p], new_mask[p] = sampled[p][0], UNMASKED
    return new_ids, new_mask


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Dense attention of one sequence, [n, H, D] over [m, Hkv, D], all keys visible; float64."""
    group = query.size(1) // keys.size(1)
    out = torch.empty(query.shape, dtype=torch.float64)
    for head in range(query.size(1)):
        scores = query[:, head].double() @ keys[:, head // group].double().T * scale
        out[:, head] = scores.softmax(-1) @ values[:, head // group].double()
    return out
