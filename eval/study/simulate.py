"""A decode of blocks with FOCUS' real selection and delayed cache, but with given deltas and decoded sets.

Letters: S blocks side by side, L block length. The rules are those of the kernels' twins in plain torch.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from lmdeploy_focus.kernels import reference
from torch import Tensor

from .traces import Recording

# state, candidates [S, L] bool -> decoded [S, L] bool, a subset of the candidates
Decide = Callable[['Blocks', Tensor], Tensor]
# state -> delta [S, L] float32 by block position
Rank = Callable[['Blocks'], Tensor]
ALPHA = 1.5


@dataclass
class Blocks:
    """S blocks between two steps: `masked`, `uncached` [S, L] bool; `progress`, `decoded`, `steps` [S] int64."""
    masked: Tensor
    uncached: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor

    @classmethod
    def fresh(cls, waiting: Tensor, length: int) -> 'Blocks':
        """Blocks whose last `waiting` [S] positions are masked."""
        masked = torch.arange(length) >= length - waiting[:, None]
        zero = torch.zeros_like(waiting)
        return cls(masked, torch.ones_like(masked), zero - 1, zero, zero.clone())


def simulate(waiting: np.ndarray, length: int, mode: str, rank: Rank, decide: Decide) -> Recording:
    """Decode blocks from their first step to their commit.

    Args:
        waiting: [S], positions to decode, the last ones of each block.
        length: L.
        mode: 'dense' runs all L positions, 'delayed' those that are not frozen, 'focus' those that selection keeps.
        rank: importance deltas of a step; used in mode 'focus' alone.
        decide: what a step decodes of what it may.
    """
    state = Blocks.fresh(torch.as_tensor(waiting.astype(np.int64)), length)
    place = torch.arange(length)
    taken: list[list[tuple[int, np.ndarray]]] = [[] for _ in waiting]
    prefix, suffix = torch.zeros_like(state.steps), torch.zeros_like(state.steps)
    running = torch.ones(len(waiting), dtype=torch.bool)
    while bool(running.any()):
        entered = state.uncached if mode != 'dense' else torch.ones_like(state.masked)
        kept, values = state.masked, torch.zeros(state.masked.shape)
        if mode == 'focus':
            values = torch.where(state.masked, rank(state).half().float(), 0)
            kept = keep(state, values)
        rows = kept | (entered & ~state.masked)
        newly = decide(state, kept) & kept & running[:, None]
        prefix, suffix = prefix + entered.sum(1) * running, suffix + rows.sum(1) * running
        maps = (newly.long() << place).sum(1).tolist()
        for block in (newly.any(1)).nonzero()[:, 0].tolist():
            taken[block].append((maps[block], values[block][state.masked[block]].numpy().astype(np.float16)))
        final = ~state.masked
        final &= torch.cat([final[:, 1:], torch.ones_like(final[:, :1])], 1)
        rightmost = torch.where(rows, place, -1).amax(1)
        final &= running[:, None]
        state = Blocks(state.masked & ~newly, state.uncached & ~final, torch.maximum(state.progress, rightmost),
                       state.decoded + newly.sum(1), state.steps + newly.any(1))
        running = newly.any(1) & state.masked.any(1)
    commit = state.uncached.sum(1) if mode != 'dense' else torch.full_like(prefix, length)
    steps = [step for block in taken for step in block]
    bits = np.array([bits % 2**64 for bits, _ in steps], np.uint64)
    delta = np.concatenate([values for _, values in steps]) if mode == 'focus' else np.zeros(0, np.float16)
    return Recording(length, waiting.astype(np.uint8), np.array([len(block) for block in taken], np.uint8), bits, delta,
                     (prefix + commit).numpy().astype(np.uint16), (suffix + commit).numpy().astype(np.uint16))


def keep(state: Blocks, delta: Tensor) -> Tensor:
    """The masked positions [S, L] that the kernels' budget and selection keep."""
    length = delta.size(1)
    count = state.masked.sum(1)
    order = (~state.masked).long().argsort(dim=1, stable=True)
    positions = torch.where(torch.arange(length) < count[:, None], order, -1)
    budgets = reference.budget(count, state.decoded, state.steps, ALPHA)
    stays = reference.select(delta.gather(1, order), positions, budgets, state.progress)
    return torch.zeros_like(state.masked).scatter(1, order, stays) & state.masked


def again(recording: Recording, mode: str) -> Recording:
    """Decode a recording's blocks once more by its deltas and decoded sets: what a replay does in the engine."""
    first = torch.as_tensor(recording.first)
    maps = torch.as_tensor(recording.decoded.view(np.int64))
    table = torch.as_tensor(recording.deltas())
    place = torch.arange(recording.length)

    def step(state: Blocks) -> Tensor:
        return (first[:-1] + state.steps).clamp_max(len(maps) - 1)

    def rank(state: Blocks) -> Tensor:
        nth = (state.masked.cumsum(1) - 1).clamp_min(0)
        return table[step(state)].gather(1, nth)

    def decide(state: Blocks, kept: Tensor) -> Tensor:
        return ((maps[step(state)][:, None] >> place) & 1).bool() & kept

    return simulate(recording.waiting, recording.length, mode, rank, decide)
