"""What a family of Python functions is, what its arguments are called and how test arguments are drawn."""
import random
from dataclasses import dataclass
from typing import Any

from .split import number, pick
from .words import SHORT_WORDS


@dataclass(frozen=True)
class Family:
    """One kind of function, in templates.

    ``{first}`` and ``{second}`` are the arguments, ``{item}``, ``{result}`` and ``{index}`` locals, ``{constant}`` a
    small number, ``{letter}`` a letter and ``{function}`` the function's own name. The first body is the reference.
    """

    names: tuple[str, ...]
    description: str
    arguments: tuple[str, ...]      # kinds: the keys of ARGUMENT_NAMES
    bodies: tuple[str, ...]


ARGUMENT_NAMES = {'numbers': ['nums', 'values', 'items', 'xs', 'data', 'arr', 'numbers'],
                  'number': ['n', 'num', 'x', 'value', 'number'],
                  'text': ['text', 's', 'string', 'word', 'line'],
                  'texts': ['words', 'strings', 'names', 'texts'],
                  'rows': ['rows', 'matrix', 'groups', 'grid'],
                  'table': ['table', 'mapping', 'scores', 'counts'],
                  'small': ['k', 'm', 'target', 'limit']}
SECOND_ARGUMENT_NAMES = {'numbers': ['other', 'ys', 'second'], 'number': ['m', 'other', 'y'],
                         'small': ['k', 'target', 'p']}


def random_argument(rng: random.Random, kind: str) -> Any:
    """A value of the kind, for an example call or a test."""
    if kind == 'numbers':
        return [number(rng, 0, 20) for _ in range(number(rng, 3, 8))]
    if kind == 'number':
        return number(rng, 1, 18)
    if kind == 'small':
        return number(rng, 1, 6)
    if kind == 'text':
        return ' '.join(pick(rng, SHORT_WORDS) for _ in range(number(rng, 1, 4)))
    if kind == 'texts':
        return rng.sample(SHORT_WORDS, number(rng, 2, 6))
    if kind == 'rows':
        return [[number(rng, 0, 9) for _ in range(number(rng, 1, 4))] for _ in range(number(rng, 1, 4))]
    return dict(zip(rng.sample(SHORT_WORDS, 4), rng.sample(range(1, 30), 4), strict=True))
