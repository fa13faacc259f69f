"""Algebra problems about whole numbers: divisors, remainders, digits."""
import random
from math import gcd

from .split import Problem, first_quantity, number, pick


def greatest_divisor(rng: random.Random, held_out: bool) -> Problem:
    """Greatest common divisor by Euclid's algorithm."""
    factor = number(rng, 1, 12)
    large, small = factor * first_quantity(rng, 2, 25, held_out), factor * number(rng, 2, 25)
    if large < small:
        large, small = small, large
    question = pick(rng, [f'Find the greatest common divisor of {large} and {small}.',
                          f'What is gcd({large}, {small})?', f'Compute the gcd of {large} and {small}.'])
    steps = [pick(rng, ['Use the Euclidean algorithm.', 'We divide repeatedly.', 'Apply Euclid.'])]
    while small:
        quotient, remainder = divmod(large, small)
        steps.append(pick(rng, [f'{large} = {quotient} * {small} + {remainder}.',
                                f'{large} mod {small} = {remainder}.']))
        large, small = small, remainder
    steps.append(pick(rng, [f'The last nonzero remainder is {large}.', f'So gcd = {large}.']))
    return question, steps, large


def least_multiple(rng: random.Random, held_out: bool) -> Problem:
    """Least common multiple from the product and the greatest common divisor."""
    left, right = first_quantity(rng, 2, 30, held_out), number(rng, 2, 20)
    divisor, product = gcd(left, right), left * right
    multiple = product // divisor
    question = pick(rng, [f'Find the least common multiple of {left} and {right}.', f'What is lcm({left}, {right})?'])
    steps = [pick(rng, [f'gcd({left}, {right}) = {divisor}.', f'The greatest common divisor is {divisor}.']),
             pick(rng, [f'{left} * {right} = {product}.', f'The product is {left} * {right} = {product}.']),
             pick(rng, [f'lcm = {product} / {divisor} = {multiple}.', f'{product} / {divisor} = {multiple}.'])]
    return question, steps, multiple


def prime_factors(rng: random.Random, held_out: bool) -> Problem:
    """The largest prime factor, or how many there are; its numbers have no reserved class."""
    value = 1
    while value < 20 or value > 900:
        value = 1
        for _ in range(number(rng, 2, 5)):
            value *= pick(rng, [2, 2, 2, 3, 3, 5, 7, 11, 13])
    factors: list[int] = []
    steps: list[str] = []
    rest, prime = value, 2
    while rest > 1:
        if rest % prime == 0:
            steps.append(pick(rng, [f'{rest} / {prime} = {rest // prime}.', f'{rest} = {prime} * {rest // prime}.']))
            factors.append(prime)
            rest //= prime
        else:
            prime += 1
    steps.append(f'{value} = {" * ".join(map(str, factors))}.')
    if rng.random() < 0.5:
        question = pick(rng, [f'What is the largest prime factor of {value}?',
                              f'Find the biggest prime that divides {value}.'])
        return question, steps, factors[-1]
    question = pick(rng, [f'How many prime factors does {value} have, counted with multiplicity?',
                          f'Count the prime factors of {value} with repetition.'])
    return question, [*steps, f'That is {len(factors)} factors.'], len(factors)


def power_remainder(rng: random.Random, held_out: bool) -> Problem:
    """The remainder of a power, one multiplication at a time."""
    base, modulus, exponent = first_quantity(rng, 2, 15, held_out), number(rng, 3, 17), number(rng, 3, 6)
    question = pick(rng, [f'What is the remainder when {base}^{exponent} is divided by {modulus}?',
                          f'Compute {base}^{exponent} mod {modulus}.'])
    factor = base % modulus
    steps = [f'{base} mod {modulus} = {factor}.']
    rest = factor
    for power in range(2, exponent + 1):
        product = rest * factor
        steps.append(pick(rng, [f'{base}^{power}: {rest} * {factor} = {product}, mod {modulus} = {product % modulus}.',
                                f'Power {power}: {rest} * {factor} = {product} = {product % modulus} mod {modulus}.']))
        rest = product % modulus
    return question, steps, rest


def binary(rng: random.Random, held_out: bool) -> Problem:
    """A number written in base 2; the answer is read as a decimal number of ones and zeros."""
    value = first_quantity(rng, 5, 200, held_out)
    rest, bits = value, ''
    steps = []
    while rest:
        half, bit = divmod(rest, 2)
        steps.append(pick(rng, [f'{rest} / 2 = {half} remainder {bit}.', f'{rest} = 2 * {half} + {bit}.']))
        bits = str(bit) + bits
        rest = half
    question = pick(rng, [f'Write {value} in binary.', f'Convert {value} to base 2.'])
    steps.append(pick(rng, ['Read the remainders backwards.', f'From bottom to top: {bits}.']))
    return question, steps, int(bits)


def digit_sum(rng: random.Random, held_out: bool) -> Problem:
    """The sum of the decimal digits."""
    value = first_quantity(rng, 100, 99999, held_out)
    digits = [int(digit) for digit in str(value)]
    steps = [f'The digits are {", ".join(map(str, digits))}.']
    total = digits[0]
    for digit in digits[1:]:
        steps.append(f'{total} + {digit} = {total + digit}.')
        total += digit
    return pick(rng, [f'What is the digit sum of {value}?', f'Add the digits of {value}.']), steps, total


def product(rng: random.Random, held_out: bool) -> Problem:
    """A product of two-digit numbers, split into tens and ones."""
    left, right = first_quantity(rng, 12, 99, held_out), number(rng, 12, 99)
    tens, ones = right // 10 * 10, right % 10
    question = pick(rng, [f'Multiply {left} by {right}.', f'What is {left} * {right}?',
                          f'Compute the product of {left} and {right}.'])
    steps = [f'{right} = {tens} + {ones}.', f'{left} * {tens} = {left * tens}.', f'{left} * {ones} = {left * ones}.',
             f'{left * tens} + {left * ones} = {left * right}.']
    return question, steps, left * right
