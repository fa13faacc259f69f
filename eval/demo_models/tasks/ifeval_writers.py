"""Task `ifeval`: instructions whose fulfilment a program can check, one writer for each kind."""
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from .split import number, pick
from .words import ADJECTIVES, KEYWORDS, NOUNS, NUMBER_WORDS, REASONS, SHORT_WORDS, TOPICS, VERBS

# The question, an answer that fulfils it, and what the checker needs besides kind and count.
Written = tuple[str, str, dict]


@dataclass(frozen=True)
class Request:
    """What is common to all kinds: the topic, how many are asked for, and how both are spelled in the prompt."""

    topic: str
    count: int
    spelled: str
    about: str


def sentence(rng: random.Random, topic: str) -> str:
    """A sentence about a topic; it holds no comma."""
    return pick(rng, [
        lambda: f'Many {pick(rng, NOUNS)} {pick(rng, VERBS)} {topic} {pick(rng, REASONS)}.',
        lambda: f'{topic.capitalize()} can be {pick(rng, ADJECTIVES)} and {pick(rng, ADJECTIVES)}.',
        lambda: f'Some {pick(rng, ADJECTIVES)} {pick(rng, NOUNS)} {pick(rng, VERBS)} {topic}.',
        lambda: f'It is {pick(rng, ["easy", "hard", "common", "helpful", "fun"])} to {pick(rng, VERBS)} {topic} '
                f'{pick(rng, REASONS)}.',
        lambda: f'The {pick(rng, ADJECTIVES)} side of {topic} is '
                f'{pick(rng, ["often", "rarely", "sometimes", "always"])} {pick(rng, ADJECTIVES)}.',
        lambda: f'{pick(rng, ["Most", "Few", "Several", "Young", "Old"])} {pick(rng, NOUNS)} {pick(rng, VERBS)} '
                f'{topic} and {pick(rng, VERBS)} them {pick(rng, REASONS)}.',
    ])()


def _sentences(rng: random.Random, request: Request, count: int | None = None) -> str:
    return ' '.join(sentence(rng, request.topic) for _ in range(request.count if count is None else count))


def spell(rng: random.Random, count: int) -> str:
    """The count as digits or as a word."""
    return pick(rng, [str(count), NUMBER_WORDS[count]])


def bullets(rng: random.Random, request: Request) -> Written:
    """A list of bullet points with a given bullet."""
    bullet = pick(rng, ['-', '*'])
    asked = pick(rng, [f'Write exactly {request.spelled} bullet points {request.about}.',
                       f'Give me {request.spelled} bullets {request.about}.',
                       f'List {request.spelled} facts {request.about} as bullet points.'])
    asked += f" Start each bullet with '{bullet}'."
    answer = '\n'.join(f'{bullet} {sentence(rng, request.topic)}' for _ in range(request.count))
    return asked, answer, {'bullet': bullet}


def lowercase(rng: random.Random, request: Request) -> Written:
    """Sentences without a capital letter."""
    asked = pick(rng, [f'Write {request.spelled} sentences {request.about}. Use only lowercase letters.',
                       f'In all lowercase, write {request.spelled} sentences {request.about}.'])
    return asked, _sentences(rng, request).lower(), {}


def uppercase(rng: random.Random, request: Request) -> Written:
    """One to four sentences in capital letters; the count is drawn anew."""
    count = number(rng, 1, 4)
    spelled = spell(rng, count)
    asked = pick(rng, [f'Write {spelled} sentence(s) {request.about} in capital letters.',
                       f'Use ONLY uppercase letters and write {spelled} sentence(s) {request.about}.'])
    return asked, _sentences(rng, request, count).upper(), {'count': count}


def keywords(rng: random.Random, request: Request) -> Written:
    """Sentences that contain two given words."""
    first, second = rng.sample(KEYWORDS, 2)
    asked = pick(rng, [f'Write {request.spelled} sentences {request.about} and include the words {first} and {second}.',
                       f'Use the keywords {first} and {second} in {request.spelled} sentences {request.about}.'])
    sentences = [sentence(rng, request.topic) for _ in range(request.count)]
    for word in (first, second):
        index = number(rng, 0, request.count - 1)
        ending = pick(rng, [f' with {word}.', f' and a {word}.', f', like a {word}.', f' near the {word}.'])
        sentences[index] = sentences[index][:-1] + ending
    return asked, ' '.join(sentences), {'words': [first, second]}


def ending(rng: random.Random, request: Request) -> Written:
    """Sentences that end with a given phrase."""
    phrase = pick(rng, ['That is all.', 'The end.', 'Thanks for reading!', 'Is there anything else?', 'Stay curious!'])
    asked = pick(rng, [f"Write {request.spelled} sentences {request.about}. End with the phrase '{phrase}'",
                       f"Finish your answer with '{phrase}' and write {request.spelled} sentences {request.about} "
                       'before it.'])
    return asked, _sentences(rng, request) + ' ' + phrase, {'phrase': phrase}


def json_object(rng: random.Random, request: Request) -> Written:
    """A JSON object with given keys."""
    keys = rng.sample(['title', 'topic', 'score', 'level', 'note', 'year', 'size', 'color', 'mood'], number(rng, 2, 4))
    listed = ', '.join(keys)
    asked = pick(rng, [f'Return a JSON object {request.about} with the keys {listed}.',
                       f'Answer in JSON format {request.about}. Keys: {listed}.'])
    values: dict[str, int | str] = {}
    for key in keys:
        if key in ('score', 'level', 'year', 'size'):
            values[key] = number(rng, 1, 99)
        elif key == 'topic':
            values[key] = request.topic
        else:
            values[key] = f'{pick(rng, ADJECTIVES)} {pick(rng, [request.topic, pick(rng, NOUNS)])}'
    return asked, json.dumps(values, indent=pick(rng, [None, 2])), {'keys': keys}


def numbered(rng: random.Random, request: Request) -> Written:
    """A numbered list."""
    asked = pick(rng, [f'Write a numbered list with {request.spelled} items {request.about}.',
                       f'Give {request.spelled} numbered points {request.about}.'])
    answer = '\n'.join(f'{index + 1}. {sentence(rng, request.topic)}' for index in range(request.count))
    return asked, answer, {}


def repetition(rng: random.Random, request: Request) -> Written:
    """One word, repeated."""
    word = pick(rng, SHORT_WORDS)
    asked = pick(rng, [f"Repeat the word '{word}' exactly {request.spelled} times, separated by spaces.",
                       f'Say {word} {request.spelled} times.'])
    return asked, ' '.join([word] * request.count), {'word': word}


def sorting(rng: random.Random, request: Request) -> Written:
    """Words in alphabetical order, or backwards; the only kind with exactly one right answer."""
    words = rng.sample(SHORT_WORDS, number(rng, 3, 7))
    backwards = rng.random() < 0.5
    order = 'reverse alphabetical' if backwards else 'alphabetically'
    listed = ', '.join(words)
    asked = pick(rng, [f'Sort these words {order}: {listed}.',
                       f'Put the words in {order} order, separated by commas: {listed}.'])
    answer = ', '.join(sorted(words, reverse=backwards))
    return asked, answer, {'exact': answer}


def paragraphs(rng: random.Random, request: Request) -> Written:
    """Paragraphs with a separator line between them."""
    asked = pick(rng, [f'Write {request.spelled} paragraphs {request.about}, separated by a line with ***.',
                       f'Give me {request.spelled} short paragraphs {request.about}. Separate them with ***.'])
    answer = '\n***\n'.join(_sentences(rng, request, number(rng, 1, 3)) for _ in range(request.count))
    return asked, answer, {}


def without_commas(rng: random.Random, request: Request) -> Written:
    """Sentences without commas."""
    asked = pick(rng, [f'Write {request.spelled} sentences {request.about} without using any commas.',
                       f'No commas please: write {request.spelled} sentences {request.about}.'])
    return asked, _sentences(rng, request), {}


def beginning(rng: random.Random, request: Request) -> Written:
    """Sentences that begin with a given word."""
    word = pick(rng, ['Honestly', 'Today', 'Clearly', 'Usually', 'Perhaps', 'Indeed'])
    asked = pick(rng, [f"Write {request.spelled} sentences {request.about}. Begin with the word '{word}'.",
                       f"Start with '{word}' and write {request.spelled} sentences {request.about}."])
    first = sentence(rng, request.topic)
    rest = ''.join(' ' + sentence(rng, request.topic) for _ in range(request.count - 1))
    return asked, word + ', ' + first[0].lower() + first[1:] + rest, {'word': word}


def adjectives(rng: random.Random, request: Request) -> Written:
    """Different adjectives in one line."""
    words = rng.sample(ADJECTIVES, request.count)
    asked = pick(rng, [f'Give {request.spelled} adjectives for {request.topic}, separated by commas.',
                       f'List {request.spelled} different adjectives that fit {request.topic} in one line with '
                       'commas.'])
    return asked, ', '.join(words), {}


# The order decides which kind a draw gives.
WRITERS: tuple[Callable[[random.Random, Request], Written], ...] = (
    bullets, lowercase, uppercase, keywords, ending, json_object, numbered, repetition, sorting, paragraphs,
    without_commas, beginning, adjectives)


def instruction(rng: random.Random, held_out: bool) -> tuple[str, str, dict]:
    """(prompt, answer, what the checker needs); the split needs no reserved quantities here."""
    topic = pick(rng, TOPICS)
    count = number(rng, 2, 10)
    spelled = spell(rng, count)
    about = pick(rng, [f'about {topic}', f'on the topic of {topic}', f'describing {topic}'])
    writer = WRITERS[number(rng, 0, len(WRITERS) - 1)]
    asked, answer, details = writer(rng, Request(topic, count, spelled, about))
    return asked, answer, {'kind': writer.__name__, 'count': count} | details
