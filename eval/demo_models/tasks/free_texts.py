"""Long text that is written from word lists: stories, tables, overviews."""
import random
from collections.abc import Callable

from .ifeval_writers import sentence
from .split import number, pick
from .words import ADJECTIVES, ITEMS, PEOPLE, PLACES, REASONS, TOPICS, VERBS

_TIMES = ['In the morning', 'Later', 'Then', 'After that', 'Around noon', 'Suddenly', 'In the evening', 'A bit later',
          'Without a sound', 'At last']


def _story_events(rng: random.Random, hero: tuple[str, str, str], friend: str, places: list[str],
                  items: str) -> list[Callable[[], str]]:
    name, he, his = hero
    return [
        lambda: f'{pick(rng, _TIMES)}, {he} went to the {pick(rng, places)} and looked for {items}.',
        lambda: f'{he.capitalize()} met {friend} at the {pick(rng, places)}, and they talked about '
                f'{pick(rng, TOPICS)}.',
        lambda: f'{pick(rng, _TIMES)} a {pick(rng, ADJECTIVES)} '
                f'{pick(rng, ["bird", "dog", "storm", "stranger", "train", "letter"])} appeared near the '
                f'{pick(rng, places)}.',
        lambda: '"' + pick(rng, ['We should wait', 'Look at this', 'I have an idea', 'This is strange',
                                 'Let us go home', 'Nobody knows that']) + f'," said {pick(rng, [name, friend])}.',
        lambda: f'{name} found {number(rng, 2, 30)} {items} and put them into {his} bag.',
        lambda: f'The {pick(rng, places)} was {pick(rng, ADJECTIVES)} and {pick(rng, ADJECTIVES)}, but {name} did '
                'not mind.',
        lambda: f'{friend} gave {name} a {pick(rng, ADJECTIVES)} '
                f'{pick(rng, ["map", "key", "box", "book", "lamp", "hat"])}.',
        lambda: f'They decided to {pick(rng, VERBS)} the {pick(rng, ADJECTIVES)} '
                f'{pick(rng, ["tower", "boat", "garden", "tunnel", "house"])} {pick(rng, REASONS)}.',
    ]


def story(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """A story of 12 to 28 sentences in paragraphs."""
    hero = pick(rng, PEOPLE)
    name = hero[0]
    friend = pick(rng, PEOPLE)[0]
    places = rng.sample(PLACES, 5)
    items = pick(rng, ITEMS)
    length = number(rng, 10, 26)
    events = _story_events(rng, hero, friend, places, items)
    sentences = [f'{pick(rng, ["Once", "One day", "Last summer", "Many years ago"])} {name} wanted to find '
                 f'{pick(rng, ADJECTIVES)} {items}.']
    sentences += [pick(rng, events)() for _ in range(length)]
    sentences.append(pick(rng, [f'In the end {name} was {pick(rng, ADJECTIVES)} and happy.',
                                f'That night {name} and {friend} slept well.',
                                f'Nobody forgot that day at the {places[0]}.']))
    paragraphs, start = [], 0
    while start < len(sentences):
        end = start + number(rng, 3, 6)
        paragraphs.append(' '.join(sentences[start:end]))
        start = end
    asked = pick(rng, [f'Tell a long story about {name}, {friend} and some {items}.',
                       f'Write a story with {name} and {friend}. It should mention {items}.'])
    return asked, '\n\n'.join(paragraphs)


def table(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """A multiplication table, a count, a table of powers, or an overview of topics."""
    kind = number(rng, 0, 3)
    if kind == 0:
        factor, last = number(rng, 2, 40), number(rng, 10, 20)
        asked = pick(rng, [f'Write the multiplication table of {factor} up to {last}.',
                           f'List {factor} times 1 to {last}.'])
        return asked, '\n'.join(f'{factor} * {value} = {factor * value}' for value in range(1, last + 1))
    if kind == 1:
        start, step, count = number(rng, 1, 200), number(rng, 2, 19), number(rng, 15, 40)
        asked = pick(rng, [f'Count from {start} in steps of {step}, {count} numbers.',
                           f'Write {count} numbers starting at {start} with step {step}.'])
        return asked, ', '.join(str(start + index * step) for index in range(count))
    if kind == 2:
        start, count = number(rng, 1, 60), number(rng, 8, 16)
        asked = pick(rng, [f'Make a table of squares and cubes from {start} to {start + count}.',
                           f'Table of n, n^2 and n^3 for n = {start} to {start + count}.'])
        rows = (f'| {value} | {value * value} | {value ** 3} |' for value in range(start, start + count + 1))
        return asked, '| n | n^2 | n^3 |\n|---|---|---|\n' + '\n'.join(rows)
    topics = rng.sample(TOPICS, number(rng, 3, 4))
    sections = (f'## {topic.capitalize()}\n' + ' '.join(sentence(rng, topic) for _ in range(number(rng, 3, 7)))
                for topic in topics)
    asked = f'Write an overview with one section for each of these topics: {", ".join(topics)}.'
    return asked, '\n\n'.join(sections)
