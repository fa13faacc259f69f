"""Makes the demo trace: blocks of the demo SDAR model on its evaluation prompts, decoded by the reference decode.

All five tasks with equally many prompts and at most 384 new tokens, as in `eval/demo_models/results.json`, whose means
the blocks that are kept have.
"""
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from eval.demo_models.checkpoint import FOLDER, load_decoder
from eval.demo_models.decode_options import DecodeOptions
from eval.demo_models.evaluate import short_questions
from eval.demo_models.network import Decoder
from eval.demo_models.reference_decode import BlockDecode, Forced, Record
from eval.demo_models.tokenizer import load_tokenizer

from .traces import MODES, Recording, join, save

# thresholds as published: a dense decode needs a higher one for the same answers
OPTIONS = {'dense': {'mode': 'base', 'threshold': 0.9}, 'delayed': {'mode': 'delayed', 'threshold': 0.9},
           'focus': {'mode': 'focus', 'threshold': 0.8}}
MAX_NEW = 384
KEPT_BLOCKS = 512
DRAWS = 4000
# means of the whole evaluation (demo_models/results.json: 'base 0.9', 'focus 0.8'); of the delayed cache it has a
# smaller run alone, 'few delayed 0.9', whose ratios to 'few base 0.9' are applied to 'base 0.9'
GOALS = {
    'dense': {'tokens_per_step': 2.269, 'rows_per_token': 15.24, 'prefix_rows_per_token': 15.24},
    'delayed': {'tokens_per_step': 2.276, 'rows_per_token': 8.78, 'prefix_rows_per_token': 8.78},
    'focus': {'tokens_per_step': 2.152, 'rows_per_token': 4.328, 'prefix_rows_per_token': 9.145}}


class RoundedDecode(BlockDecode):
    """The reference decode with importance deltas of half precision, so that a file of such deltas repeats it."""

    def _evict(self, record: Record, forced: Forced | None) -> None:
        record['delta'] = record['delta'].half().float()
        super()._evict(record, forced)


@dataclass
class _Block:
    waiting: int
    decoded: list[int] = field(default_factory=list)
    delta: list[np.ndarray] = field(default_factory=list)
    prefix_rows: int = 0
    suffix_rows: int = 0


class Recorder:
    """Collects the blocks of a decode, step by step."""

    def __init__(self, length: int):
        self.length = length
        self.weights = (np.uint64(1) << np.arange(length, dtype=np.uint64))
        self.blocks: dict[tuple[int, int], _Block] = {}

    def __call__(self, record: Record) -> None:
        """One step's record."""
        values = {name: record[name].numpy() for name in ('row', 'history', 'masked', 'unmasked', 'processed', 'kept')}
        delta = record['delta'].numpy() if 'delta' in record else None
        for index, key in enumerate(zip(values['row'].tolist(), values['history'].tolist(), strict=True)):
            masked = values['masked'][index]
            block = self.blocks.setdefault(key, _Block(int(masked.sum())))
            block.prefix_rows += int(values['processed'][index].sum())
            block.suffix_rows += int(values['kept'][index].sum())
            if masked.any():
                block.decoded.append(int((self.weights * values['unmasked'][index]).sum()))
                if delta is not None:
                    block.delta.append(delta[index][masked].astype(np.float16))

    def recording(self) -> Recording:
        """All blocks so far."""
        blocks = list(self.blocks.values())
        deltas = [part for block in blocks for part in block.delta]
        return Recording(
            self.length,
            waiting=np.array([block.waiting for block in blocks], np.uint8),
            steps=np.array([len(block.decoded) for block in blocks], np.uint8),
            decoded=np.array([step for block in blocks for step in block.decoded], np.uint64),
            delta=np.concatenate(deltas) if deltas else np.zeros(0, np.float16),
            prefix_rows=np.array([block.prefix_rows for block in blocks], np.uint16),
            suffix_rows=np.array([block.suffix_rows for block in blocks], np.uint16))


def representative(recording: Recording, count: int, goal: dict[str, float], seed: int = 0) -> Recording:
    """`count` blocks with the means of the whole evaluation, which a part of its prompts misses by some percent.

    Blocks are drawn without replacement, with weights that grow exponentially with their steps; the exponent makes
    tokens a step right on average, and of many seeded draws the best is taken. One block of every number of positions
    to decode is always kept.
    """
    rng = np.random.default_rng(seed)
    values = np.stack([recording.waiting, recording.steps, recording.prefix_rows, recording.suffix_rows]).astype(float)
    goals = np.array([goal['tokens_per_step'], goal['prefix_rows_per_token'], goal['rows_per_token']])
    _, always = np.unique(recording.waiting, return_index=True)

    def draw(exponent: float) -> np.ndarray:
        keys = rng.gumbel(size=recording.blocks) + exponent * values[1]
        keys[always] = np.inf
        return np.argsort(-keys)[:count]

    def means(blocks: np.ndarray) -> np.ndarray:
        tokens, steps, prefix, suffix = values[:, blocks].sum(1)
        return np.array([tokens / steps, prefix / tokens, suffix / tokens])

    low, high = -0.5, 0.5
    for _ in range(20):
        middle = (low + high) / 2
        fast = np.mean([means(draw(middle))[0] for _ in range(50)]) > goals[0]
        low, high = (middle, high) if fast else (low, middle)
    draws = (draw(middle) for _ in range(DRAWS))
    return recording.take(min(draws, key=lambda blocks: np.abs(means(blocks) / goals - 1).max()))


def decode_blocks(model: Decoder, prompts: list[list[int]], mode: str, max_new: int) -> Recording:
    """All blocks of the answers to these prompts."""
    options = DecodeOptions(max_new=max_new, partial_block='decode', **OPTIONS[mode])
    run, recorder = RoundedDecode(model, prompts, options), Recorder(options.block_length)
    while run.running:
        recorder(run.step())
    return recorder.recording()


def complete(recording: Recording, model: Decoder, prompts: list[list[int]], mode: str, each: int = 4) -> Recording:
    """The recording with some blocks of each number of positions to decode that no prompt's end left: the first blocks
    of answers to prompts without their first tokens."""
    length, parts = recording.length, [recording]
    for waiting in sorted(set(range(1, length + 1)) - set(recording.waiting.tolist())):
        cut = [prompt[(len(prompt) + waiting) % length:] for prompt in prompts if len(prompt) > length][:each]
        parts.append(decode_blocks(model, cut, mode, 1))
    return join(parts)


@torch.inference_mode()
def record(path: Path, per_task: int, kept_blocks: int = KEPT_BLOCKS) -> dict[str, Recording]:
    """Decode, choose, save; prints the means of all blocks and of those that are kept."""
    questions = short_questions(load_tokenizer(FOLDER / 'sdar'), per_task)
    model = load_decoder(FOLDER / 'sdar')
    recordings, note = {}, {'prompts_per_task': per_task, 'max_new': MAX_NEW, 'options': OPTIONS}
    for mode in MODES:
        start = time.time()
        everything = decode_blocks(model, questions.prompts, mode, MAX_NEW)
        whole = complete(everything, model, questions.prompts, mode)
        recordings[mode] = representative(whole, kept_blocks, GOALS[mode])
        note[mode] = {'all': everything.means(), 'kept': recordings[mode].means()}
        print(f'{mode}: {note[mode]} in {time.time() - start:.0f} s', file=sys.stderr, flush=True)
    save(path, recordings, note)
    return recordings
