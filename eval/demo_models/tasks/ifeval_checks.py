"""Checkers of task `ifeval`: does an answer do what its prompt asked for?"""
import json
import re
from collections.abc import Callable


def _sentence_count(text: str) -> int:
    return len(re.findall(r'[.!?](?:\s|$)', text))


def _lines(text: str) -> list[str]:
    return [line for line in text.split('\n') if line.strip()]


def _bullets(asked: dict, text: str) -> bool:
    lines = _lines(text)
    return len(lines) == asked['count'] and all(line.startswith(asked['bullet'] + ' ') for line in lines)


def _lowercase(asked: dict, text: str) -> bool:
    return text == text.lower() and _sentence_count(text) == asked['count']


def _uppercase(asked: dict, text: str) -> bool:
    return text == text.upper() and _sentence_count(text) == asked['count']


def _keywords(asked: dict, text: str) -> bool:
    return _sentence_count(text) == asked['count'] and all(word in text.lower() for word in asked['words'])


def _ending(asked: dict, text: str) -> bool:
    return text.endswith(asked['phrase']) and _sentence_count(text) == asked['count'] + 1


def _json_object(asked: dict, text: str) -> bool:
    try:
        return set(json.loads(text)) == set(asked['keys'])
    except (ValueError, TypeError, RecursionError):
        return False


def _numbered(asked: dict, text: str) -> bool:
    lines = _lines(text)
    return len(lines) == asked['count'] and all(line.startswith(f'{index + 1}. ') for index, line in enumerate(lines))


def _repetition(asked: dict, text: str) -> bool:
    return text.lower().split() == [asked['word']] * asked['count']


def _sorting(asked: dict, text: str) -> bool:
    return text == asked['exact']


def _paragraphs(asked: dict, text: str) -> bool:
    parts = [part.strip() for part in text.split('***')]
    return len(parts) == asked['count'] and all(parts)


def _without_commas(asked: dict, text: str) -> bool:
    return ',' not in text and _sentence_count(text) == asked['count']


def _beginning(asked: dict, text: str) -> bool:
    return text.startswith(asked['word']) and _sentence_count(text) == asked['count']


def _adjectives(asked: dict, text: str) -> bool:
    words = [word.strip() for word in text.split(',')]
    return len(words) == asked['count'] and len(set(words)) == asked['count']


_CHECKS: dict[str, Callable[[dict, str], bool]] = {
    'bullets': _bullets, 'lowercase': _lowercase, 'uppercase': _uppercase, 'keywords': _keywords, 'ending': _ending,
    'json_object': _json_object, 'numbered': _numbered, 'repetition': _repetition, 'sorting': _sorting,
    'paragraphs': _paragraphs, 'without_commas': _without_commas, 'beginning': _beginning, 'adjectives': _adjectives}


def follows(asked: dict, text: str) -> bool:
    """Whether the answer fulfils the instruction; white space around it does not count.

    Args:
        asked: 'kind', 'count' and the details of the kind, as `ifeval_writers.instruction` gives them.
        text: the answer.
    """
    return _CHECKS[asked['kind']](asked, text.strip())
