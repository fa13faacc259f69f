"""Recorded decodes of blocks: which positions each step decoded, and the importance deltas that chose what it kept.

Letters: L block length, B blocks. A recording holds whole blocks, from the first step to the last; the blocks that an
answer began in have fewer than L positions to decode, always the last ones of the block.
"""
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

MODES = ('dense', 'delayed', 'focus')
DEMO = Path(__file__).resolve().parents[1] / 'traces' / 'demo.npz'


@dataclass
class Recording:
    """B decoded blocks of one mode; steps and deltas of all blocks lie one after the other.

    Attributes:
        length: L.
        waiting: [B] uint8, positions to decode.
        steps: [B] uint8, steps of each block; its commit is none.
        decoded: [sum of steps] uint64, map of the positions that a step decoded.
        delta: [sum over steps of the masked positions] float16, importance delta of the j-th masked position; empty
            where nothing is evicted.
        prefix_rows, suffix_rows: [B] uint16, rows that entered and that were kept, the commit's with them.
    """
    length: int
    waiting: np.ndarray
    steps: np.ndarray
    decoded: np.ndarray
    delta: np.ndarray
    prefix_rows: np.ndarray
    suffix_rows: np.ndarray

    @property
    def blocks(self) -> int:
        """B."""
        return len(self.waiting)

    @property
    def first(self) -> np.ndarray:
        """[B + 1] first step of each block."""
        return np.concatenate([[0], np.cumsum(self.steps, dtype=np.int64)])

    def means(self) -> dict[str, float]:
        """Tokens a step and rows a decoded token, commits counted among the rows and not among the steps."""
        tokens = int(self.waiting.sum())
        return {'blocks': self.blocks, 'tokens_per_step': round(tokens / int(self.steps.sum()), 3),
                'rows_per_token': round(int(self.suffix_rows.sum()) / tokens, 3),
                'prefix_rows_per_token': round(int(self.prefix_rows.sum()) / tokens, 3)}

    def before(self) -> np.ndarray:
        """[sum of steps] uint64, map of the masked positions before each step."""
        masked = np.empty_like(self.decoded)
        first = self.first
        for block, count in enumerate(self.waiting):
            left = all_bits(self.length) ^ all_bits(self.length - int(count))
            for step in range(first[block], first[block + 1]):
                masked[step] = left
                left &= ~int(self.decoded[step])
        return masked

    def deltas(self) -> np.ndarray:
        """[sum of steps, L] float32, delta of the j-th masked position, 0 beyond the last."""
        table = np.zeros((len(self.decoded), self.length), np.float32)
        if len(self.delta):
            counts = np.array([int(value).bit_count() for value in self.before()])
            table[np.arange(self.length) < counts[:, None]] = self.delta
        return table

    def take(self, blocks: np.ndarray) -> 'Recording':
        """The blocks of these numbers, in that order."""
        first = self.first
        counts = np.array([int(value).bit_count() for value in self.before()])
        start = np.concatenate([[0], np.cumsum(counts)])
        steps = [np.arange(first[block], first[block + 1]) for block in blocks]
        delta = [self.delta[start[first[block]]:start[first[block + 1]]] for block in blocks]
        return Recording(self.length, self.waiting[blocks], self.steps[blocks], self.decoded[np.concatenate(steps)],
                         np.concatenate(delta), self.prefix_rows[blocks], self.suffix_rows[blocks])


def join(recordings: Sequence[Recording]) -> Recording:
    """The blocks of all, of the same length and mode."""
    arrays = {f.name: np.concatenate([getattr(recording, f.name) for recording in recordings])
              for f in fields(Recording) if f.name != 'length'}
    return Recording(length=recordings[0].length, **arrays)


def all_bits(count: int) -> int:
    """The map of the positions 0 ... count - 1."""
    return (1 << count) - 1


def save(path: Path, recordings: dict[str, Recording], note: dict) -> None:
    """One compressed file of all modes."""
    arrays = {f'{mode}_{f.name}': np.asarray(getattr(recording, f.name))
              for mode, recording in recordings.items() for f in fields(Recording)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, note=np.array(json.dumps(note)), **arrays)


def load(path: Path) -> tuple[dict[str, Recording], dict]:
    """What :func:`save` wrote: recordings by mode, and the note.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f'--trace: {path} does not exist; --record makes it')
    with np.load(path) as data:
        recordings = {mode: Recording(**{f.name: data[f'{mode}_{f.name}'] for f in fields(Recording)})
                      for mode in MODES}
        for recording in recordings.values():
            recording.length = int(recording.length)
        return recordings, json.loads(str(data['note']))
