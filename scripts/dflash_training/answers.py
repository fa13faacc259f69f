"""Stage 1: the target answers the prompts, greedily and sampled. What is answered lies in a file at once."""
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from .options import Options
from .prompts import Sample
from .target import Target


def answer_prompts(target: Target, prompts: Sequence[Sample], held_out: Sequence[Sample], options: Options,
                   path: Path) -> tuple[list[Sample], list[Sample]]:
    """Samples with the target's answers, those for training and the held-out ones; those that `path` has are read.

    Held-out answers are greedy and a block longer than the others: the last block of an answer may overrun its limit.

    Args:
        path: JSON lines with `index` (held-out prompts follow the others), `prompt`, `answer` (token ids), `sampled`.
    """
    done = _read(path)
    everything = [*prompts, *held_out]
    # One drawing for each prompt, whatever has been answered before.
    chance = random.Random(f'sampled-{options.seed}')
    sampled = {index for index in range(len(prompts)) if chance.random() < options.sampled_share}
    batches = [(kind, batch) for kind, indices in (
        ('held out', range(len(prompts), len(everything))),
        ('sampled', sorted(sampled)),
        ('greedy', [index for index in range(len(prompts)) if index not in sampled]),
    ) for batch in _batches(everything, indices, options.generation_batch)]
    with path.open('a', encoding='utf-8') as file, tqdm(
            total=len(everything), initial=len(done), desc='answers', unit='prompt', file=sys.stderr) as bar:
        for number, (kind, batch) in enumerate(batches):
            if all(index in done for index in batch):
                continue
            limit = options.max_new_tokens + (options.block_size if kind == 'held out' else 0)
            temperature = options.temperature if kind == 'sampled' else None
            answers = target.answer([everything[index].prompt for index in batch], limit, temperature,
                                    options.seed * 1_000_003 + number)
            for index, answer in zip(batch, answers, strict=True):
                if index not in done:
                    done[index] = answer
                    file.write(json.dumps({'index': index, 'prompt': everything[index].prompt, 'answer': answer,
                                           'sampled': kind == 'sampled'}) + '\n')
                    bar.update()
            file.flush()
            os.fsync(file.fileno())
    full = [Sample(sample.prompt, done[index]) for index, sample in enumerate(everything)]
    return full[:len(prompts)], full[len(prompts):]


def _batches(samples: Sequence[Sample], indices: Sequence[int], size: int) -> Iterator[list[int]]:
    """Prompts of about the same length together."""
    ordered = sorted(indices, key=lambda index: (len(samples[index].prompt), index))
    for start in range(0, len(ordered), size):
        yield ordered[start:start + size]


def _read(path: Path) -> dict[int, tuple[int, ...]]:
    """Answers by index. A last line that a stop has cut off is removed from the file."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[:content.rfind(b'\n') + 1]
    if whole != content:
        with path.open('r+b') as file:
            file.truncate(len(whole))
    records = [json.loads(line) for line in whole.decode().splitlines()]
    return {record['index']: tuple(record['answer']) for record in records}
