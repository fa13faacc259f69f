"""Word problems about distances, ages, shares, areas and who has more."""
import random

from .split import Problem, first_quantity, number, pick
from .words import ITEMS, PEOPLE


def travel(rng: random.Random, held_out: bool) -> Problem:
    """Two or three legs of a trip, each with its own speed."""
    name, he, _ = pick(rng, PEOPLE)
    verb = pick(rng, ['drives', 'cycles', 'walks', 'sails', 'rides'])
    told: list[str] = []
    steps: list[str] = []
    total = 0
    for leg in range(number(rng, 2, 3)):
        speed = first_quantity(rng, 3, 60, held_out) if leg == 0 else number(rng, 3, 60)
        hours = number(rng, 2, 6)
        distance = speed * hours
        template = pick(rng, ['{who} {verb} for {hours} hours at {speed} km per hour',
                              '{who} {verb} {hours} hours with a speed of {speed} km/h'])
        who = name if leg == 0 else pick(rng, ['then ' + he, 'after a break ' + he])
        told.append(template.format(who=who, verb=verb, hours=hours, speed=speed))
        steps.append(pick(rng, [f'Part {leg + 1}: {speed} * {hours} = {distance} km.',
                                f'In {hours} hours {he} covers {speed} * {hours} = {distance} km.',
                                f'Distance {leg + 1} is {speed} * {hours} = {distance}.']))
        if leg:
            steps.append(pick(rng, [f'Total so far: {total} + {distance} = {total + distance}.',
                                    f'{total} + {distance} = {total + distance} km.']))
        total += distance
    question = pick(rng, ['How far is the whole trip in km?', 'What is the total distance?',
                          f'How many km does {name} travel?'])
    return ', '.join(told) + '. ' + question, steps, total


def _relation(rng: random.Random, who: str, other: str, base: int, items: str) -> tuple[str, str, int]:
    """What `who` has in terms of what `other` has: the sentence, the step, the count."""
    kind = pick(rng, ['times', 'more', 'fewer'] if base > 5 else ['times', 'more'])
    if kind == 'times':
        factor = number(rng, 2, 5)
        count = base * factor
        told = pick(rng, [f'{who} has {factor} times as many as {other}.',
                          f'{who} owns {factor} times the {items} of {other}.'])
        step = pick(rng, [f'{who} has {base} * {factor} = {count} {items}.',
                          f'{factor} times {base} is {base} * {factor} = {count}, the amount of {who}.'])
    elif kind == 'more':
        more = number(rng, 2, 30)
        count = base + more
        told = pick(rng, [f'{who} has {more} more than {other}.', f'{who} has {more} {items} more than {other}.'])
        step = pick(rng, [f'{who} has {base} + {more} = {count} {items}.',
                          f'For {who} we get {base} + {more} = {count}.'])
    else:
        fewer = number(rng, 1, base - 1)
        count = base - fewer
        told = pick(rng, [f'{who} has {fewer} fewer than {other}.', f'{who} has {fewer} {items} less than {other}.'])
        step = pick(rng, [f'{who} has {base} - {fewer} = {count} {items}.',
                          f'For {who} we get {base} - {fewer} = {count}.'])
    return told, step, count


def comparison(rng: random.Random, held_out: bool) -> Problem:
    """Two or three people, each count told through somebody else's; asks for the sum."""
    people = [person[0] for person in rng.sample(PEOPLE, 3)]
    items = pick(rng, ITEMS)
    counts = [first_quantity(rng, 4, 40, held_out)]
    told = [f'{people[0]} has {counts[0]} {items}.']
    steps = []
    for who in (people[1:] if rng.random() < 0.6 else people[1:2]):
        other = number(rng, 0, len(counts) - 1)
        sentence, step, count = _relation(rng, who, people[other], counts[other], items)
        told.append(sentence)
        steps.append(step)
        counts.append(count)
    total = counts[0]
    for count in counts[1:]:
        steps.append(pick(rng, [f'Adding up: {total} + {count} = {total + count}.',
                                f'{total} + {count} = {total + count}.',
                                f'Together {total} + {count} = {total + count} {items}.']))
        total += count
    question = pick(rng, ['How many do they have in total?', f'How many {items} do they have together?',
                          f'What is the total number of {items}?'])
    return ' '.join(told) + ' ' + question, steps, total


def ages(rng: random.Random, held_out: bool) -> Problem:
    """One person is some times as old as another; asks for the future."""
    young, old = (person[0] for person in rng.sample(PEOPLE, 2))
    age = first_quantity(rng, 5, 40, held_out)
    factor, years = number(rng, 2, 4), number(rng, 2, 15)
    older = age * factor
    story = pick(rng, [f'{young} is {age} years old. {old} is {factor} times as old as {young}.',
                       f'{old} is {factor} times as old as {young}, who is {age}.'])
    steps = [pick(rng, [f'{old} is {age} * {factor} = {older} years old now.',
                        f'Today {old} is {factor} * {age} = {older}.'])]
    then, older_then = age + years, older + years
    if rng.random() < 0.5:
        steps.append(pick(rng, [f'In {years} years {old} will be {older} + {years} = {older_then}.',
                                f'{older} + {years} = {older_then}.']))
        question = pick(rng, [f' How old will {old} be in {years} years?',
                              f' What is the age of {old} after {years} years?'])
        return story + question, steps, older_then
    total = then + older_then
    steps += [pick(rng, [f'In {years} years {young} will be {age} + {years} = {then}.',
                         f'{young} then is {age} + {years} = {then}.']),
              pick(rng, [f'And {old} will be {older} + {years} = {older_then}.',
                         f'{old} then is {older} + {years} = {older_then}.']),
              pick(rng, [f'The sum is {then} + {older_then} = {total}.', f'{then} + {older_then} = {total}.'])]
    return story + f' What will be the sum of their ages in {years} years?', steps, total


def sharing(rng: random.Random, held_out: bool) -> Problem:
    """Division with remainder; asks for one share or for what is left."""
    name, he, _ = pick(rng, PEOPLE)
    friends, each, extra = number(rng, 2, 9), first_quantity(rng, 3, 30, held_out), number(rng, 0, 5)
    items = pick(rng, ITEMS)
    extra = min(extra, friends - 1)
    shared = friends * each
    total = shared + extra
    own = number(rng, 1, total - 1)
    more = total - own
    story = pick(rng, [f'{name} has {own} {items} and gets {more} more. {he.capitalize()} shares them equally among '
                       f'{friends} friends.',
                       f'{name} mixes {own} {items} with {more} others and divides all of them equally between '
                       f'{friends} children.'])
    steps = [pick(rng, [f'In total there are {own} + {more} = {total} {items}.', f'{own} + {more} = {total}.']),
             pick(rng, [f'{friends} * {each} = {shared}, so everyone gets {each}.',
                        f'Each share is {total} // {friends} = {each}.',
                        f'{total} divided by {friends} gives {each} with remainder {extra}.'])]
    if rng.random() < 0.5:
        question = pick(rng, [' How many does each one get?', f' How many {items} are in one share?'])
        return story + question, steps, each
    steps.append(pick(rng, [f'The rest is {total} - {shared} = {extra}.',
                            f'{total} - {shared} = {extra} are left over.']))
    return story + pick(rng, [' How many are left over?', f' How many {items} cannot be shared?']), steps, extra


def rectangle(rng: random.Random, held_out: bool) -> Problem:
    """Area times a price, or the perimeter walked some times."""
    length, width = first_quantity(rng, 3, 30, held_out), number(rng, 3, 20)
    shape = pick(rng, ['garden', 'field', 'room', 'poster', 'yard', 'pool', 'carpet', 'wall'])
    story = pick(rng, [f'A rectangular {shape} is {length} m long and {width} m wide.',
                       f'The sides of a {shape} are {length} m and {width} m.'])
    if rng.random() < 0.5:
        price = number(rng, 2, 9)
        area = length * width
        question = pick(rng, [f' One square meter costs ${price}. What is the full price?',
                              f' Covering it costs ${price} per square meter. What is the cost?'])
        steps = [pick(rng, [f'The area is {length} * {width} = {area} square meters.',
                            f'{length} * {width} = {area} is the area.']),
                 pick(rng, [f'The price is {area} * {price} = {area * price}.',
                            f'{area} * {price} = {area * price} dollars.'])]
        return story + question, steps, area * price
    rounds = number(rng, 2, 6)
    half = length + width
    perimeter = 2 * half
    question = pick(rng, [f' {pick(rng, PEOPLE)[0]} walks around it {rounds} times. How many meters is that?',
                          f' How long is a rope that goes around it {rounds} times?'])
    steps = [pick(rng, [f'Two sides add to {length} + {width} = {half}.', f'{length} + {width} = {half}.']),
             pick(rng, [f'The perimeter is 2 * {half} = {perimeter}.', f'Doubling gives 2 * {half} = {perimeter} m.']),
             pick(rng, [f'{rounds} rounds are {perimeter} * {rounds} = {perimeter * rounds} m.',
                        f'{perimeter} * {rounds} = {perimeter * rounds}.'])]
    return story + question, steps, perimeter * rounds
