"""Prompts and answers as files have them, and as token ids."""
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer, both token ids; the answer ends with its stop token if it has one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()


def json_lines(path: Path, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place for messages; empty lines are passed over.

    Raises:
        ValueError: a line is no JSON object; the message has flag, file and line.
    """
    with path.open(encoding='utf-8') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f'{flag} {path}, line {number}'
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f'{place} is {_short(line)}; it must be a JSON object: {error}') from error
                if not isinstance(record, dict):
                    raise ValueError(f'{place} is {_short(line)}; it must be a JSON object')
                yield place, record


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:40] + '...')


class Encoder:
    """Makes token ids of what a file holds.

    Args:
        tokenizer: of the target, transformers'.
        chat: whether a bare prompt is a message of the user.
        vocabulary: ids are below it.
    """

    def __init__(self, tokenizer: Any, chat: bool, vocabulary: int) -> None:
        self.tokenizer, self.chat, self.vocabulary = tokenizer, chat, vocabulary

    def prompt(self, record: dict[str, Any], place: str) -> tuple[int, ...]:
        """Token ids of `messages`, in the chat template and ready to be answered, or of `prompt`.

        Raises:
            ValueError: the record has neither or both, or they are of another form; the message begins with `place`.
        """
        messages, prompt = record.get('messages'), record.get('prompt')
        if (messages is None) == (prompt is None):
            raise ValueError(f'{place} has the fields {sorted(record)}; it must have either prompt or messages')
        if isinstance(prompt, list):
            return self._ids(prompt, 'prompt', place)
        if prompt is not None and not (isinstance(prompt, str) and prompt):
            raise ValueError(f'{place}: prompt is {prompt!r}; it must be a text that is not empty, or token ids')
        if prompt is not None and not self.chat:
            return tuple(self.tokenizer(prompt)['input_ids'])
        messages = [{'role': 'user', 'content': prompt}] if messages is None else messages
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the target's authors and may raise anything
            raise ValueError(f'{place}: the chat template refuses messages {_short(json.dumps(messages))}; they must '
                             f'be a list of objects with role and content: {error}') from error
        return tuple(self.tokenizer(text, add_special_tokens=False)['input_ids'])

    def answer(self, record: dict[str, Any], place: str, stop: int) -> tuple[int, ...]:
        """Token ids of `answer`; a text gets the stop token at its end.

        Raises:
            ValueError: as above.
        """
        answer = record.get('answer')
        if isinstance(answer, list):
            return self._ids(answer, 'answer', place)
        if not isinstance(answer, str):
            raise ValueError(f'{place}: answer is {answer!r}; it must be a text or token ids')
        return (*self.tokenizer(answer, add_special_tokens=False)['input_ids'], stop)

    def _ids(self, ids: list[Any], field: str, place: str) -> tuple[int, ...]:
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocabulary:
                raise ValueError(f'{place}: {field} has {token!r}; a token id must be a whole number from 0 to '
                                 f'{self.vocabulary - 1}')
        return tuple(ids)


def read_samples(path: Path, flag: str, encoder: Encoder, longest_prompt: int, stop: int | None) -> list[Sample]:
    """The different prompts of a file in its order, those that are too long left out.

    Args:
        stop: the stop token; None if the file has no answers.

    Raises:
        ValueError: a line is wrong, or fewer than two prompts are left.
    """
    if stop is not None or path.suffix in ('.jsonl', '.json'):
        records = list(json_lines(path, flag))
    else:
        lines = path.read_text(encoding='utf-8').splitlines()
        records = [(f'{flag} {path}, line {number}', {'prompt': line.strip()})
                   for number, line in enumerate(lines, 1) if line.strip()]
    samples: dict[Sample, None] = {}
    for place, record in records:
        prompt = encoder.prompt(record, place)
        if 0 < len(prompt) <= longest_prompt:
            samples[Sample(prompt, () if stop is None else encoder.answer(record, place, stop))] = None
    if len({sample.prompt for sample in samples}) < 2:
        raise ValueError(f'{flag} {path} has {len(samples)} different prompts of at most {longest_prompt} tokens '
                         '(--max-prompt-tokens); there must be at least 2, one of which is held out')
    return list(samples)


def hold_out(samples: list[Sample], count: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples for training, and held-out prompts without answers: `count`, or a fifth of the prompts where that is
    less. No prompt is in both."""
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    chosen = random.Random(f'held-out-{seed}').sample(prompts, min(count, max(1, len(prompts) // 5)))
    held = set(chosen)
    return [sample for sample in samples if sample.prompt not in held], [Sample(prompt) for prompt in chosen]
