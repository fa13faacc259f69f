"""Task `code`: short Python functions of 81 families, judged by running them."""
import random
from typing import Any

from .code_family import ARGUMENT_NAMES, SECOND_ARGUMENT_NAMES, Family, random_argument
from .code_lists import LIST_FAMILIES
from .code_numbers import NUMBER_FAMILIES
from .code_text import TEXT_FAMILIES
from .split import number, pick

FAMILIES: tuple[Family, ...] = LIST_FAMILIES + NUMBER_FAMILIES + TEXT_FAMILIES
_REQUESTS = ['Write a Python function `{signature}` that {description}.',
             'Implement `{signature}` in Python. It {description}.',
             'Please write a function called {function} that {description}.',
             'Create the Python function {function}. The function {description}.',
             'Define `{signature}`: a function that {description}.',
             'I need a Python function {function} which {description}.']
_OPENINGS = ['', '', '', 'Here is the function:\n', 'Sure, this works:\n', 'One way to do it:\n',
             'Below is an implementation of {function}.\n', 'The following code does this:\n']
_CLOSINGS = ['', '', '', '\nThe function {description}.', '\nIt takes {arguments} and {description}.',
             '\nExample: `{call}`.', '\nCall it as `{call}`.']
_DOCSTRINGS = ['', '', '    """{Description}."""\n', '    """{Description}."""\n', '    # {Description}.\n',
               '    """{function}: {Description}."""\n']


def _indented(body: str) -> str:
    return ''.join('    ' + line + '\n' for line in body.split('\n'))


def _fill_in(rng: random.Random, family: Family) -> tuple[dict[str, Any], list[str]]:
    """Names and constants of one function, and the names of its arguments."""
    function = pick(rng, family.names)
    if rng.random() < 0.25:
        function = pick(rng, ['my_', 'get_', 'compute_', 'do_', 'the_', 'calc_']) + function
    blanks = {'function': function, 'first': pick(rng, ARGUMENT_NAMES[family.arguments[0]]),
              'constant': number(rng, 2, 9), 'letter': pick(rng, list('abcdegilmnoprst')),
              'item': pick(rng, ['v', 'item', 'e', 'cur', 'el']), 'result': pick(rng, ['result', 'out', 'res', 'ans']),
              'index': pick(rng, ['i', 'j', 'idx'])}
    arguments = [blanks['first']]
    if len(family.arguments) > 1:
        names = [name for name in SECOND_ARGUMENT_NAMES[family.arguments[1]] if name != blanks['first']]
        blanks['second'] = pick(rng, names)
        arguments.append(blanks['second'])
    return blanks, arguments


def code_problem(rng: random.Random, held_out: bool) -> tuple[str, str, dict]:
    """(prompt, answer, what the checker needs: the function's name, a reference and six argument lists)."""
    which = number(rng, 0, len(FAMILIES) - 1)
    family = FAMILIES[which]
    blanks, arguments = _fill_in(rng, family)
    function = blanks['function']
    description = family.description.format(**blanks)
    body = pick(rng, family.bodies).format(**blanks)
    signature = f'{function}({", ".join(arguments)})'
    call = f'{function}({", ".join(repr(random_argument(rng, kind)) for kind in family.arguments)})'
    request = pick(rng, _REQUESTS).format(signature=signature, description=description, function=function)
    if rng.random() < 0.25:
        request += pick(rng, [' Use a code block.', ' Answer with code.', ' Keep it short.'])
    docstring = pick(rng, _DOCSTRINGS).format(Description=description[0].upper() + description[1:], function=function)
    code = f'def {signature}:\n' + docstring + _indented(body)
    answer = pick(rng, _OPENINGS).format(function=function) + '```python\n' + code + '```'
    answer += pick(rng, _CLOSINGS).format(description=description, arguments=' and '.join(arguments), call=call)
    if not held_out:
        return request, answer, {}
    # Every problem of a family is tried on the same arguments, whatever its names are.
    test_rng = random.Random(which * 7919 + 13)
    tests = [[random_argument(test_rng, kind) for kind in family.arguments] for _ in range(6)]
    reference = f'def {signature}:\n' + _indented(family.bodies[0].format(**blanks))
    return request, answer, {'name': function, 'reference': reference, 'tests': tests}
