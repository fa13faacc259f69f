"""Word problems, the long kind: somebody's collection grows and shrinks through two to five events."""
import random
from collections.abc import Callable

from .split import Problem, first_quantity, number, pick
from .words import CONTAINERS, ITEMS, PEOPLE, PLACES

# What is told, how it is computed, and how many there are afterwards.
Event = tuple[str, str, int]
Names = dict[str, str]


def _gain(rng: random.Random, before: int, names: Names) -> Event:
    amount = number(rng, 2, 40)
    told = pick(rng, ['{He} buys {amount} more {items} at the {place}.', '{friend} gives {name} {amount} more.',
                      'Then {he} finds {amount} {items} near the {place}.',
                      'Later {name} gets {amount} more {items} from {friend}.', '{His} aunt sends {amount} {items}.',
                      'In the {place}, {he} picks up {amount} more.'])
    step = pick(rng, ['Adding {amount} gives {before} + {amount} = {after}.',
                      'After getting {amount} more there are {before} + {amount} = {after} {items}.',
                      'Now {he} has {before} + {amount} = {after} {items}.',
                      '{amount} more makes {before} + {amount} = {after}.',
                      'So the total becomes {before} + {amount} = {after}.'])
    values = dict(names, amount=amount, before=before, after=before + amount)
    return told.format(**values), step.format(**values), before + amount


def _packs(rng: random.Random, before: int, names: Names) -> Event:
    count, each = number(rng, 2, 6), number(rng, 2, 9)
    container = pick(rng, CONTAINERS)
    told = pick(rng, ['{He} buys {count} {container} with {each} {items} each.',
                      '{friend} brings {count} {container}, and each holds {each} {items}.',
                      '{name} opens {count} {container} of {each} {items}.'])
    step = pick(rng, ['The {container} contain {count} * {each} = {amount} {items}, so there are '
                      '{before} + {amount} = {after}.',
                      '{count} * {each} = {amount} new {items}. {before} + {amount} = {after}.',
                      'That is {count} * {each} = {amount} more, and {before} + {amount} = {after}.'])
    after = before + count * each
    values = dict(names, count=count, each=each, container=container, amount=count * each, before=before, after=after)
    return told.format(**values), step.format(**values), after


_GIVEN = ['{He} gives {amount} {items} to {friend}.', '{name} donates {amount} of them to the {place}.',
          '{He} sells {amount} {items}.', '{friend} borrows {amount} {items} from {name}.']
_LOST = ['{He} loses {amount} {items} on the way to the {place}.', 'Unfortunately, {amount} of them break.',
         'On the way home {he} drops {amount} {items}.']


def _shrink(rng: random.Random, before: int, names: Names, told_options: list[str]) -> Event:
    amount = number(rng, 1, min(before - 2, 40))
    told = pick(rng, told_options)
    step = pick(rng, ['Subtracting {amount} leaves {before} - {amount} = {after}.',
                      'Now {before} - {amount} = {after} {items} remain.',
                      'After that {he} has {before} - {amount} = {after} {items}.',
                      'That leaves {before} - {amount} = {after}.',
                      'Taking away {amount} gives {before} - {amount} = {after}.'])
    values = dict(names, amount=amount, before=before, after=before - amount)
    return told.format(**values), step.format(**values), before - amount


def _give(rng: random.Random, before: int, names: Names) -> Event:
    return _shrink(rng, before, names, _GIVEN)


def _lose(rng: random.Random, before: int, names: Names) -> Event:
    return _shrink(rng, before, names, _LOST)


def _share(rng: random.Random, before: int, names: Names, parts: int, share: str) -> Event:
    amount = before // parts
    told = pick(rng, ['{He} gives {share} of the {items} to {friend}.', 'Then {share} of them are sold at the {place}.',
                      '{name} hides {share} of {his} {items} and never finds them again.'])
    step = pick(rng, ['{Share} of {before} is {before} / {parts} = {amount}, so {before} - {amount} = {after} remain.',
                      '{before} / {parts} = {amount} are gone. {before} - {amount} = {after}.',
                      'Since {before} / {parts} = {amount}, there are {before} - {amount} = {after} {items} left.'])
    values = dict(names, share=share, Share=share.capitalize(), parts=parts, amount=amount, before=before,
                  after=before - amount)
    return told.format(**values), step.format(**values), before - amount


def _half(rng: random.Random, before: int, names: Names) -> Event:
    return _share(rng, before, names, 2, 'half')


def _third(rng: random.Random, before: int, names: Names) -> Event:
    return _share(rng, before, names, 3, 'a third')


def _multiply(rng: random.Random, before: int, names: Names) -> Event:
    factor = number(rng, 2, 3)
    verb = 'doubles' if factor == 2 else 'triples'
    told = pick(rng, ['Over the month {he} {verb} {his} {items}.', 'By the next week the number of {items} {verb}.',
                      'With luck, {name} {verb} the collection.'])
    step = pick(rng, ['Multiplying by {factor}: {before} * {factor} = {after}.',
                      'The number {verb} to {before} * {factor} = {after} {items}.', '{before} * {factor} = {after}.'])
    values = dict(names, verb=verb, factor=factor, before=before, after=before * factor)
    return told.format(**values), step.format(**values), before * factor


def _daily(rng: random.Random, before: int, names: Names) -> Event:
    days, each = number(rng, 2, 5), number(rng, 2, 4)
    told = pick(rng, ['For {days} days {he} uses {each} {items} each day.',
                      '{He} gives away {each} {items} a day for {days} days.',
                      'Each day for {days} days, {each} {items} disappear.'])
    step = pick(rng, ['In {days} days {days} * {each} = {amount} are used, leaving {before} - {amount} = {after}.',
                      '{days} * {each} = {amount}, and {before} - {amount} = {after}.',
                      'That uses {days} * {each} = {amount} {items}. Now {before} - {amount} = {after} remain.'])
    after = before - days * each
    values = dict(names, days=days, each=each, amount=days * each, before=before, after=after)
    return told.format(**values), step.format(**values), after


_EVENTS: dict[str, Callable[[random.Random, int, Names], Event]] = {
    'add': _gain, 'packs': _packs, 'find': _gain, 'give': _give, 'lose': _lose, 'half': _half, 'third': _third,
    'double': _multiply, 'daily': _daily}


def _possible_events(count: int) -> list[str]:
    events = ['add', 'packs', 'find']
    if count >= 6:
        events += ['give', 'give', 'lose']
    if count % 2 == 0 and count > 4:
        events.append('half')
    if count % 3 == 0 and count > 6:
        events.append('third')
    if count <= 60:
        events.append('double')
    if count >= 24:
        events.append('daily')
    return events


def collection(rng: random.Random, held_out: bool) -> Problem:
    """Two to five events; an event kind that comes twice in a row is drawn once more."""
    name, he, his = pick(rng, PEOPLE)
    friend = pick(rng, PEOPLE)[0]
    while friend == name:
        friend = pick(rng, PEOPLE)[0]
    items = pick(rng, ITEMS)
    count = first_quantity(rng, 8, 90, held_out)
    names = {'name': name, 'he': he, 'his': his, 'He': he.capitalize(), 'His': his.capitalize(), 'friend': friend,
             'items': items, 'place': pick(rng, PLACES)}
    story = [pick(rng, ['{name} has {count} {items}.', '{name} starts the week with {count} {items}.',
                        "There are {count} {items} in {name}'s collection.", '{name} keeps {count} {items} at home.',
                        'At first {name} owns {count} {items}.']).format(count=count, **names)]
    steps = [pick(rng, ['{name} starts with {count} {items}.', 'At the beginning there are {count} {items}.',
                        'We begin with {count} {items}.', 'Initially {name} has {count} {items}.',
                        'The starting amount is {count}.']).format(count=count, **names)]
    last = None
    for _ in range(number(rng, 2, 5)):
        possible = _possible_events(count)
        event = pick(rng, possible)
        if event == last:
            event = pick(rng, possible)
        last = event
        told, step, count = _EVENTS[event](rng, count, names)
        story.append(told)
        steps.append(step)
        if count > 600:
            break
    question = pick(rng, ['How many {items} does {name} have now?', 'How many {items} are left in the end?',
                          'Find the final number of {items}.',
                          'What is the number of {items} that {name} has at the end?']).format(**names)
    return ' '.join(story) + ' ' + question, steps, count
