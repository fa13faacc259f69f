"""Requests: real prompts of a data set, or token lengths drawn from distributions shaped like published ones.

Log-normal lengths, seeded, cut to [4, 8 times the mean]. Means in tokens: ShareGPT as vLLM's benchmark draws it
(Kwon et al. 2023, figure 11: 161 in, 338 out); WildChat's first turns (Zhao et al. 2024, table 1: 296 in, 442 out);
MATH (Hendrycks et al. 2021): problems of about 80 tokens with the chat template, worked answers of about 330.
"""
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SMALLEST, CUT = 4, 8


@dataclass(frozen=True)
class Lengths:
    """Means of the lengths in tokens, and the deviations of their logarithms."""
    prompt: float
    answer: float
    prompt_spread: float = 1.0
    answer_spread: float = 0.8


WORKLOADS = {'sharegpt': Lengths(161, 338, 1.1, 0.9), 'wildchat': Lengths(296, 442, 1.3, 0.8),
             'math': Lengths(80, 330, 0.5, 0.6)}


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt and the number of tokens to generate."""
    prompt: list[int]
    answer: int


def requests(lengths: Lengths, limit: int, seed: int, max_new: int | None = None,
             prompts: list[list[int]] | None = None) -> Iterator[Request]:
    """An endless stream of requests, the same for the same arguments.

    Args:
        lengths: of prompts and answers.
        limit: random prompt tokens are below it, and those of a data set are folded to below it.
        seed: of everything.
        max_new: cut of the answers.
        prompts: token ids of a data set's prompts, taken in a seeded order, again and again.
    """
    rng = random.Random(seed)
    order = list(range(len(prompts or ())))
    rng.shuffle(order)
    number = 0
    while True:
        size = draw(rng, lengths.prompt, lengths.prompt_spread)
        ids = [rng.randrange(limit) for _ in range(size)]
        if prompts:
            ids = [token % limit for token in prompts[order[number % len(order)]]]
        answer = draw(rng, lengths.answer, lengths.answer_spread)
        yield Request(ids, answer if max_new is None else min(answer, max_new))
        number += 1


def draw(rng: random.Random, mean: float, spread: float) -> int:
    """A log-normal length of this mean, cut."""
    value = rng.lognormvariate(math.log(mean) - spread ** 2 / 2, spread)
    return int(min(max(SMALLEST, round(value)), CUT * mean))


def read_prompts(path: Path, tokenizer: str) -> list[list[int]]:
    """Token ids of a data set's prompts, with the tokenizer's chat template if it has one.

    JSON (a list) or JSON lines. A record is a string, or an object with `prompt`, `problem`, `question`, `text`, or a
    conversation (`conversations` of ShareGPT, `conversation` of WildChat), whose first human turn is the prompt.

    Raises:
        ValueError: a record has none of these, or there is no record.
    """
    from transformers import AutoTokenizer
    text = path.read_text(encoding='utf-8')
    records = json.loads(text) if text.lstrip()[:1] == '[' else [json.loads(line) for line in text.splitlines() if line]
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    prompts = [_prompt(record) for record in records]
    if encoder.chat_template:
        prompts = [encoder.apply_chat_template([{'role': 'user', 'content': prompt}], tokenize=False,
                                               add_generation_prompt=True) for prompt in prompts]
    ids = [encoder(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    ids = [prompt for prompt in ids if len(prompt) >= SMALLEST]
    if not ids:
        raise ValueError(f'--dataset: {path} has no prompt of at least {SMALLEST} tokens')
    return ids


def _prompt(record: str | dict) -> str:
    if isinstance(record, str):
        return record
    for turn in record.get('conversations') or record.get('conversation') or ():
        if turn.get('from', turn.get('role')) in ('human', 'user'):
            return turn.get('value', turn.get('content'))
    for name in ('prompt', 'problem', 'question', 'text'):
        if name in record:
            return record[name]
    raise ValueError(f'--dataset: a record has the fields {sorted(record)}; one of prompt, problem, question, text, '
                     'conversations, conversation is needed')
