"""What an evaluation item is, and how answers are judged."""
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .ifeval_checks import follows
from .worked_answer import final_answer_is

_SANDBOX = Path(__file__).with_name('sandbox.py')
_SANDBOX_SECONDS = 600


@dataclass(frozen=True)
class Item:
    """A held-out prompt.

    Attributes:
        task: 'math', 'algebra', 'code', 'ifeval' or 'free'.
        prompt: the user's text.
        reference: an answer that the checker accepts.
        expected: what the checker needs; its keys are the task's own.
    """

    task: str
    prompt: str
    reference: str
    expected: dict = field(default_factory=dict, repr=False)

    def check(self, answer: str) -> bool:
        """Whether the answer is right; ValueError for task `free`, which has no checker."""
        return judge(self, answer)


def _run_code(cases: list[tuple[str, dict]]) -> list[bool]:
    """Verdicts of generated functions, from processes that share nothing with this one."""
    with tempfile.TemporaryDirectory() as folder:
        given, verdicts = Path(folder, 'cases.json'), Path(folder, 'verdicts.json')
        given.write_text(json.dumps(cases))
        subprocess.run([sys.executable, '-I', str(_SANDBOX), str(given), str(verdicts)], check=True,
                       timeout=_SANDBOX_SECONDS)
        return json.loads(verdicts.read_text())


def score(items: Sequence[Item], answers: Sequence[str]) -> list[bool | None]:
    """Judges answers, each decoded without special tokens: True, False, or None where the task has no checker.

    Raises:
        ValueError: the two lists differ in length.
    """
    verdicts: list[bool | None] = [None] * len(items)
    code = []
    for index, (item, answer) in enumerate(zip(items, answers, strict=True)):
        if item.task in ('math', 'algebra'):
            verdicts[index] = final_answer_is(item.expected['answer'], answer)
        elif item.task == 'ifeval':
            verdicts[index] = follows(item.expected, answer)
        elif item.task == 'code':
            code.append(index)
    if code:
        run = _run_code([(answers[index], items[index].expected) for index in code])
        for index, verdict in zip(code, run, strict=True):
            verdicts[index] = verdict
    return verdicts


def judge(item: Item, text: str) -> bool:
    """The verdict on one answer. For many answers of task `code`, `score` starts one interpreter instead of many.

    Raises:
        ValueError: the item's task has no checker.
    """
    verdict = score([item], [text])[0]
    if verdict is None:
        raise ValueError(f'task={item.task!r} has no checker')
    return verdict
