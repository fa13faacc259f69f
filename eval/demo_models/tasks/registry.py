"""The five tasks and the draws of both splits."""
import random
from collections.abc import Callable

from .algebra_problems import algebra_problem
from .code_problems import code_problem
from .free_problems import free_text
from .ifeval_writers import instruction
from .items import Item
from .math_problems import math_problem
from .split import is_eval_prompt

_GENERATORS: dict[str, Callable[[random.Random, bool], tuple[str, str, dict]]] = {
    'math': math_problem, 'algebra': algebra_problem, 'code': code_problem, 'ifeval': instruction, 'free': free_text}
ALL_TASKS = tuple(_GENERATORS)
TASKS = ('math', 'algebra', 'code', 'ifeval')
# Share of the training documents; documents of `free` are three to four times longer.
TASK_WEIGHTS = (0.32, 0.17, 0.20, 0.15, 0.16)
_EVAL_SEED = 10_007


def sample(rng: random.Random, task: str, held_out: bool) -> tuple[str, str, dict]:
    """One (prompt, answer, what the checker needs) of the training split or, held out, of the evaluation split."""
    while True:
        prompt, answer, expected = _GENERATORS[task](rng, held_out)
        if is_eval_prompt(prompt) == held_out:
            return prompt, answer, expected


def training_pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of all tasks in the training mixture."""
    tasks = rng.choices(ALL_TASKS, TASK_WEIGHTS, k=count)
    return [sample(rng, task, False)[:2] for task in tasks]


def eval_set(task: str | None, per_task: int) -> list[Item]:
    """The first held-out items of a task, always the same; None means the four judged tasks, one after the other.

    The items of `free` depend on the Python that runs this, those of the other tasks do not.

    Raises:
        ValueError: there is no such task, or `per_task` is negative.
    """
    if task is None:
        return [item for name in TASKS for item in eval_set(name, per_task)]
    if task not in ALL_TASKS:
        raise ValueError(f'task={task!r}: expected one of {", ".join(ALL_TASKS)}')
    if per_task < 0:
        raise ValueError(f'per_task={per_task}: expected 0 or more')
    rng = random.Random(f'eval-{task}-{_EVAL_SEED}')
    items: list[Item] = []
    seen = set()
    while len(items) < per_task:
        prompt, answer, expected = sample(rng, task, True)
        if prompt not in seen:
            seen.add(prompt)
            items.append(Item(task, prompt, answer, expected))
    return items
