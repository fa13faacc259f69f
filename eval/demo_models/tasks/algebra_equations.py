"""Algebra problems about unknowns: equations, polynomials, percentages."""
import random

from .split import Problem, first_quantity, number, pick, signed
from .words import VARIABLES


def linear(rng: random.Random, held_out: bool) -> Problem:
    """``a x + b = c``, solved for x."""
    name = pick(rng, VARIABLES)
    factor, answer, offset = number(rng, 2, 12), first_quantity(rng, 2, 30, held_out), number(rng, -40, 40)
    product = factor * answer
    right = product + offset
    question = pick(rng, [f'Solve for {name}: {factor}{name} {signed(offset)} = {right}',
                          f'Find {name} if {factor}{name} {signed(offset)} = {right}.',
                          f'What is {name} when {factor}{name} {signed(offset)} = {right}?'])
    verb = 'Subtract' if offset >= 0 else 'Add'
    steps = [pick(rng, [f'{verb} {abs(offset)} on both sides: {factor}{name} = {product}.',
                        f'{right} {signed(-offset)} = {product}, so {factor}{name} = {product}.',
                        f'This means {factor}{name} = {right} {signed(-offset)} = {product}.']),
             pick(rng, [f'Divide by {factor}: {name} = {product} / {factor} = {answer}.',
                        f'{name} = {product} / {factor} = {answer}.',
                        f'Then {name} = {answer} because {factor} * {answer} = {product}.'])]
    if rng.random() < 0.3:
        steps.append(f'Check: {factor} * {answer} {signed(offset)} = {right}.')
    return question, steps, answer


def linear_both_sides(rng: random.Random, held_out: bool) -> Problem:
    """``a x + b = c x + d``, solved for x."""
    name = pick(rng, VARIABLES)
    left, right = number(rng, 4, 12), number(rng, 1, 3)
    answer, offset = first_quantity(rng, 2, 20, held_out), number(rng, -20, 20)
    constant = left * answer + offset - right * answer
    factor, product = left - right, constant - offset
    question = pick(rng, [f'Solve {left}{name} {signed(offset)} = {right}{name} {signed(constant)}.',
                          f'Find the value of {name}: {left}{name} {signed(offset)} = {right}{name} '
                          f'{signed(constant)}'])
    steps = [pick(rng, [f'Move {right}{name} to the left: {factor}{name} {signed(offset)} = {constant}.',
                        f'Subtract {right}{name}: {factor}{name} {signed(offset)} = {constant}.']),
             pick(rng, [f'Then {factor}{name} = {constant} {signed(-offset)} = {product}.',
                        f'So {factor}{name} = {product}.']),
             pick(rng, [f'{name} = {product} / {factor} = {answer}.',
                        f'Dividing by {factor} gives {name} = {answer}.'])]
    return question, steps, answer


def sum_and_difference(rng: random.Random, held_out: bool) -> Problem:
    """Two unknowns from their sum and difference."""
    larger, smaller = first_quantity(rng, 2, 30, held_out), number(rng, 1, 30)
    total, difference = larger + smaller, larger - smaller
    double = total + difference
    question = pick(rng, [f'Two numbers have sum {total} and difference {difference}. What is the larger one?'
                          if difference >= 0 else f'Solve x + y = {total} and x - y = {difference} for x.',
                          f'Given x + y = {total} and x - y = {difference}, find x.',
                          f'Solve the system x + y = {total}, x - y = {difference}. What is x?'])
    steps = [pick(rng, [f'Add the equations: 2x = {total} {signed(difference)} = {double}.',
                        f'Adding both gives 2x = {double}.']),
             pick(rng, [f'x = {double} / 2 = {larger}.', f'Half of {double} is {larger}.']),
             pick(rng, [f'Then y = {total} - {larger} = {smaller}.', f'Also y = {smaller}.'])]
    return question, steps, larger


def polynomial(rng: random.Random, held_out: bool) -> Problem:
    """The value of a quadratic polynomial."""
    square, slope, constant = number(rng, 1, 9), number(rng, -9, 9), number(rng, -20, 20)
    point = first_quantity(rng, 2, 15, held_out)
    name = pick(rng, VARIABLES)
    first, second = square * point * point, slope * point
    value = first + second + constant
    terms = f'{square}{name}^2 {signed(slope)}{name} {signed(constant)}'
    question = pick(rng, [f'Evaluate {terms} at {name} = {point}.', f'If {name} = {point}, what is {terms}?'])
    steps = [f'{name}^2 = {point} * {point} = {point * point}.', f'{square} * {point * point} = {first}.',
             f'{slope} * {point} = {second}.',
             pick(rng, [f'{first} {signed(second)} {signed(constant)} = {value}.',
                        f'{first} {signed(second)} = {first + second}, and {first + second} {signed(constant)} = '
                        f'{value}.'])]
    return question, steps, value


def expansion(rng: random.Random, held_out: bool) -> Problem:
    """The middle coefficient of ``(k x + a)(x + b)``."""
    left, right, factor = first_quantity(rng, 1, 15, held_out), number(rng, -9, 12), number(rng, 1, 5)
    name = pick(rng, VARIABLES)
    coefficient = left + right * factor
    product = f'({factor}{name} {signed(left)})({name} {signed(right)})'
    question = pick(rng, [f'Expand {product}. What is the coefficient of {name}?',
                          f'What is the coefficient of {name} in {product}?'])
    steps = [f'{product} = {factor}{name}^2 {signed(right * factor)}{name} {signed(left)}{name} '
             f'{signed(left * right)}.',
             pick(rng, [f'The {name} terms: {right * factor} {signed(left)} = {coefficient}.',
                        f'{right * factor} {signed(left)} = {coefficient}.'])]
    return question, steps, coefficient


def percentage(rng: random.Random, held_out: bool) -> Problem:
    """A percentage, or a value after it went up or down by one."""
    percent = pick(rng, [5, 10, 15, 20, 25, 30, 40, 50, 60, 75])
    value = 20 * first_quantity(rng, 2, 40, held_out)
    part = value * percent // 100
    if rng.random() < 0.4:
        question = pick(rng, [f'What is {percent}% of {value}?', f'Compute {percent} percent of {value}.'])
        steps = [pick(rng, [f'{value} / 100 * {percent} = {part}.', f'{percent}% means {percent} / 100.']),
                 f'{value} * {percent} / 100 = {value * percent} / 100 = {part}.']
        return question, steps, part
    increases = rng.random() < 0.5
    answer = value + part if increases else value - part
    verb = 'increases' if increases else 'decreases'
    question = pick(rng, [f'A price of {value} {verb} by {percent}%. What is the new price?',
                          f'The value {value} {verb} by {percent} percent. Find the new value.'])
    steps = [pick(rng, [f'{percent}% of {value} is {part}.', f'{value} * {percent} / 100 = {part}.']),
             f'{value} {"+" if increases else "-"} {part} = {answer}.']
    return question, steps, answer
