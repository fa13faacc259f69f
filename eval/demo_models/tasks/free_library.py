"""Long text from Python's own standard library: continue a module, explain a function.

One module in twelve is held out from training. The text depends on the Python that runs this.
"""
import ast
import functools
import os
import random
import sysconfig
import zlib
from typing import TypeVar

from .split import number, pick

_SKIPPED = ('test', 'tests', 'site-packages', 'dist-packages', '__pycache__', 'idlelib', 'encodings', 'lib2to3',
            'pydoc_data', 'turtledemo', 'idle_test', 'ensurepip')
_CHARACTERS = 12e6
_FUNCTIONS = 20000
Entry = TypeVar('Entry', bound=tuple[str, ...])


def is_held_out(module: str) -> bool:
    """Whether a module's text is kept out of training."""
    return zlib.crc32(module.encode()) % 12 == 0


def _files(library: str) -> list[str]:
    files = []
    for root, folders, names in os.walk(library):
        folders[:] = sorted(folder for folder in folders if folder not in _SKIPPED)
        files += [os.path.join(root, name) for name in sorted(names) if name.endswith('.py')]
    random.Random(0).shuffle(files)
    return files


def _documented(module: str, text: str) -> list[tuple[str, str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and 60 < len(docstring) < 1500:
                arguments = ', '.join(argument.arg for argument in node.args.args)
                found.append((module, f'{node.name}({arguments})', docstring))
    return found


@functools.cache
def library_text() -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """(module, source) and (module, signature, docstring) of the standard library, about 12 MB in all."""
    library = sysconfig.get_paths()['stdlib']
    sources: list[tuple[str, str]] = []
    functions: list[tuple[str, str, str]] = []
    total = 0
    for path in _files(library):
        try:
            with open(path, encoding='utf-8') as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        if not 500 < len(text) < 200000 or not text.isascii():
            continue
        module = os.path.relpath(path, library)[:-3].replace(os.sep, '.')
        sources.append((module, text))
        functions += _documented(module, text)[:_FUNCTIONS - len(functions)]
        total += len(text)
        if total > _CHARACTERS:
            break
    return sources, functions


def _choose(rng: random.Random, table: list[Entry], held_out: bool) -> Entry:
    for _ in range(200):
        entry = pick(rng, table)
        if is_held_out(entry[0]) == held_out:
            return entry
    return pick(rng, table)


def source(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """The lines of a module after some given ones."""
    module, text = _choose(rng, library_text()[0], held_out)
    lines = text.split('\n')
    start = number(rng, 0, max(0, len(lines) - 20))
    middle = start + number(rng, 3, 10)
    before = '\n'.join(lines[start:middle])[:500]
    after = '\n'.join(lines[middle:middle + number(rng, 15, 60)])[:number(rng, 700, 1900)]
    asked = pick(rng, [f'Continue this Python code from the module {module}:\n{before}',
                       f'Here is a part of {module}. Write the next lines.\n{before}'])
    return asked, after


def doc(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """The docstring of a function."""
    module, signature, docstring = _choose(rng, library_text()[1], held_out)
    asked = pick(rng, [f'What does the function {signature} from the module {module} do?',
                       f'Explain `{signature}` in {module}.', f'Write the docstring of {signature} ({module}).'])
    return asked, docstring
