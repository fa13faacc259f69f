"""Task `math`: word problems with worked answers."""
import random

from .math_money import seats, shopping, wage
from .math_relations import ages, comparison, rectangle, sharing, travel
from .math_story import collection
from .split import pick
from .worked_answer import PROMPT_ENDS, worked_answer

_KINDS = [collection] * 5 + [shopping] * 2 + [travel, wage, comparison, comparison, seats, ages, sharing, rectangle]


def math_problem(rng: random.Random, held_out: bool) -> tuple[str, str, dict]:
    """(prompt, answer, what the checker needs)."""
    question, steps, answer = pick(rng, _KINDS)(rng, held_out)
    return question + pick(rng, PROMPT_ENDS), worked_answer(rng, steps, answer), {'answer': str(answer)}
