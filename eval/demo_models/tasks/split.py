"""The line between training and evaluation, and the three ways in which a generator draws.

A prompt belongs to the evaluation split exactly when ``crc32(prompt) % 16 == 0``. Training generators reject such
prompts, evaluation generators accept only those. On top of that the first quantity of a problem is never ``11 k + 4``
in training, while half of the evaluation problems use exactly those.
"""
import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar('Choice')
# A question, the worked steps of its answer, and the answer.
Problem = tuple[str, list[str], int]


def is_eval_prompt(prompt: str) -> bool:
    """Whether the prompt is held out from training."""
    return zlib.crc32(prompt.encode()) % 16 == 0


def pick(rng: random.Random, options: Sequence[Choice]) -> Choice:
    """One of the options; exactly one draw, so that data sets stay the same from one Python version to the next."""
    return options[int(rng.random() * len(options))]


def number(rng: random.Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def first_quantity(rng: random.Random, low: int, high: int, held_out: bool) -> int:
    """The first quantity of a problem; the residue class 4 mod 11 is reserved for evaluation."""
    if held_out and rng.random() < 0.5:
        reserved = [value for value in range(low, high + 1) if value % 11 == 4]
        if reserved:
            return pick(rng, reserved)
    while True:
        value = number(rng, low, high)
        if held_out or value % 11 != 4:
            return value


def signed(value: int) -> str:
    """The value as a term that is added: ``+ 3`` or ``- 3``."""
    return f'+ {value}' if value >= 0 else f'- {-value}'
