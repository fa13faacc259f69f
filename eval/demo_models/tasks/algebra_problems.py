"""Task `algebra`: equations and number theory with worked answers."""
import random

from .algebra_equations import expansion, linear, linear_both_sides, percentage, polynomial, sum_and_difference
from .algebra_integers import (
    binary,
    digit_sum,
    greatest_divisor,
    least_multiple,
    power_remainder,
    prime_factors,
    product,
)
from .algebra_sums import arithmetic_series, average, column
from .split import pick
from .worked_answer import PROMPT_ENDS, worked_answer

_KINDS = [linear, linear, linear_both_sides, sum_and_difference, greatest_divisor, least_multiple, arithmetic_series,
          polynomial, prime_factors, power_remainder, percentage, expansion, binary, column, product, digit_sum,
          average]


def algebra_problem(rng: random.Random, held_out: bool) -> tuple[str, str, dict]:
    """(prompt, answer, what the checker needs)."""
    question, steps, answer = pick(rng, _KINDS)(rng, held_out)
    return question + pick(rng, PROMPT_ENDS), worked_answer(rng, steps, answer), {'answer': str(answer)}
