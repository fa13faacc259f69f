"""Task `free`: long text without a checker; it is trained on and timed, never judged."""
import random
import re

from .algebra_problems import algebra_problem
from .code_problems import code_problem
from .free_library import doc, source
from .free_texts import story, table
from .math_problems import math_problem
from .split import is_eval_prompt, number, pick


def _part(rng: random.Random, generator, held_out: bool) -> tuple[str, str]:
    """One problem of a bundle; in training it must not be an evaluation prompt of its own task."""
    while True:
        prompt, answer, _ = generator(rng, held_out)
        if held_out or not is_eval_prompt(prompt):
            return prompt, answer


def multi_math(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Two to four word problems and algebra problems at once."""
    count = number(rng, 2, 4)
    parts = [_part(rng, math_problem if rng.random() < 0.5 else algebra_problem, held_out) for _ in range(count)]
    asked = pick(rng, ['Solve these problems one after the other.', f'Answer the following {count} questions.',
                       'Work through all problems.'])
    asked += ''.join(f'\n{index + 1}) {prompt}' for index, (prompt, _) in enumerate(parts))
    heading = pick(rng, ['Problem {index}', '**{index})**', '## Question {index}', '{index})'])
    answers = (heading.format(index=index + 1) + '\n' + answer for index, (_, answer) in enumerate(parts))
    return asked, '\n\n'.join(answers)


def multi_code(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Two to five functions in one module."""
    count = number(rng, 2, 5)
    parts = [_part(rng, code_problem, held_out) for _ in range(count)]
    asked = pick(rng, [f'Write a Python module with {count} functions.',
                       f'I need {count} Python functions in one file.', 'Create a small Python module.'])
    asked += ''.join(f'\n{index + 1}. {prompt}' for index, (prompt, _) in enumerate(parts))
    functions = [code.rstrip() for _, answer in parts for code in re.findall(r'```python\n(.*?)```', answer, re.DOTALL)]
    opening = pick(rng, ['', 'Here is the module.\n', 'The module contains all functions:\n'])
    return asked, opening + '```python\n' + '\n\n\n'.join(functions) + '\n```'


_KINDS = (source, doc, story, table, multi_math, multi_code)
_WEIGHTS = (0.20, 0.10, 0.20, 0.12, 0.20, 0.18)


def free_text(rng: random.Random, held_out: bool) -> tuple[str, str, dict]:
    """(prompt, answer, which kind it is)."""
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    prompt, answer = kind(rng, held_out)
    return prompt, answer, {'kind': kind.__name__}
