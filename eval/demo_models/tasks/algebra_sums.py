"""Algebra problems that add: series, columns of numbers, averages."""
import random

from .split import Problem, first_quantity, number, pick, signed


def arithmetic_series(rng: random.Random, held_out: bool) -> Problem:
    """A term of an arithmetic sequence, or the sum of its first terms."""
    start, step, count = first_quantity(rng, 1, 30, held_out), number(rng, 2, 9), number(rng, 4, 12)
    added = (count - 1) * step
    last = start + added
    beginning = f'{start}, {start + step}, {start + 2 * step}, ...'
    if rng.random() < 0.5:
        question = pick(rng, [f'What is term {count} of the arithmetic sequence {beginning}?',
                              f'Find the {count}th term of {beginning}'])
        steps = [pick(rng, [f'The difference is {step}.', f'Each step adds {start + step} - {start} = {step}.']),
                 pick(rng, [f'We add it {count} - 1 = {count - 1} times: {count - 1} * {step} = {added}.',
                            f'({count} - 1) * {step} = {added}.']),
                 f'{start} + {added} = {last}.']
        return question, steps, last
    ends = start + last
    total = count * ends // 2
    question = pick(rng, [f'Find the sum of the first {count} terms of {beginning}',
                          f'An arithmetic sequence starts at {start} with difference {step}. What is the sum of its '
                          f'first {count} terms?'])
    steps = [f'The last term is {start} + {count - 1} * {step} = {last}.',
             pick(rng, [f'First plus last is {start} + {last} = {ends}.', f'{start} + {last} = {ends}.']),
             f'The sum is {count} * {ends} / 2 = {count * ends} / 2 = {total}.']
    return question, steps, total


def column(rng: random.Random, held_out: bool) -> Problem:
    """The sum of three to five numbers."""
    count = number(rng, 3, 5)
    values = [first_quantity(rng, 10, 300, held_out)] + [number(rng, 5, 300) for _ in range(count - 1)]
    listed, added = ', '.join(map(str, values)), ' + '.join(map(str, values))
    question = pick(rng, [f'Add the numbers {listed}.', f'What is the sum of {listed}?', f'Compute {added}.'])
    steps = []
    total = values[0]
    for value in values[1:]:
        steps.append(pick(rng, [f'{total} + {value} = {total + value}.',
                                f'Adding {value} to {total} gives {total + value}.']))
        total += value
    return question, steps, total


def average(rng: random.Random, held_out: bool) -> Problem:
    """The mean of three to five numbers, which is always whole."""
    count, mean = number(rng, 3, 5), first_quantity(rng, 5, 40, held_out)
    values = [mean + number(rng, -4, 9) for _ in range(count - 1)]
    values.append(mean * count - sum(values))
    listed = ', '.join(map(str, values))
    question = pick(rng, [f'Find the average of {listed}.', f'What is the mean of {listed}?'])
    steps = []
    total = values[0]
    for value in values[1:]:
        steps.append(f'{total} {signed(value)} = {total + value}.')
        total += value
    steps += [pick(rng, [f'There are {count} numbers.', f'Divide by {count}.']), f'{total} / {count} = {mean}.']
    return question, steps, mean
