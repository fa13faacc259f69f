"""The synthetic tasks: held-out questions, references and checkers."""
import hashlib
import random

import pytest

from eval.demo_models.tasks import ALL_TASKS, TASKS, Item, eval_set, judge, score, training_pairs
from eval.demo_models.tasks.split import first_quantity, is_eval_prompt

# Of the prompts and references of the first 50 items. Published scores hold for exactly these questions.
FINGERPRINTS = {'math': 'dc384b48837e1005', 'algebra': '4e061108a7ba780e',
                'code': 'daa494dcba17b9d2', 'ifeval': '7615d56997769b04'}


@pytest.mark.parametrize('task', TASKS)
def test_the_questions_stay_the_same(task):
    """Red when a draw is added, a word list reordered or a template changed."""
    digest = hashlib.sha256()
    for item in eval_set(task, 50):
        digest.update(item.prompt.encode() + b'\0' + item.reference.encode() + b'\0')
    assert digest.hexdigest()[:16] == FINGERPRINTS[task]


@pytest.mark.parametrize('task', TASKS)
def test_references_are_right_and_other_answers_are_wrong(task):
    """Red when a checker refuses a right answer, or accepts a truncated one or that to another question."""
    items = eval_set(task, 60)
    references = [item.reference for item in items]
    assert score(items, references) == [True] * len(items)
    assert score(items, [''] * len(items)) == [False] * len(items)
    truncated = score(items, [text[:len(text) // 3] for text in references])
    assert sum(truncated) <= len(items) // 20
    # Two questions may share an answer: a sum, or a list of five adjectives.
    shifted = score(items, references[1:] + references[:1])
    assert sum(shifted) <= len(items) // 4


@pytest.mark.parametrize(('text', 'right'), [
    ('#### 12', True), ('so 12.\n####12\n', True), ('#### 12 apples', True), ('#### 12\n#### 13', True),
    ('#### 13\n#### 12', False), ('#### 120', False), ('#### -12', False), ('the answer is 12', False)])
def test_the_final_answer_is_the_first_marked_number(text, right):
    """Red when a number without the mark counts, or a later one."""
    assert judge(Item('math', '?', '#### 12', {'answer': '12'}), text) is right


INSTRUCTIONS = [
    ({'kind': 'bullets', 'count': 2, 'bullet': '-'}, '- One.\n\n- Two.', '- One.\n* Two.'),
    ({'kind': 'lowercase', 'count': 2}, 'one. two.', 'one. Two.'),
    ({'kind': 'uppercase', 'count': 1}, 'ONE.', 'One.'),
    ({'kind': 'keywords', 'count': 2, 'words': ['sun', 'rain']}, 'The Sun. A rain!', 'The sun. No more.'),
    ({'kind': 'ending', 'count': 1, 'phrase': 'The end.'}, 'One. The end.', 'The end. One.'),
    ({'kind': 'json_object', 'count': 3, 'keys': ['a', 'b']}, '{"b": 1, "a": "x"}', '{"a": 1}'),
    ({'kind': 'json_object', 'count': 3, 'keys': ['a']}, ' {"a": 1}\n', 'a: 1'),
    ({'kind': 'json_object', 'count': 3, 'keys': ['a']}, '{"a": null}', '7'),
    ({'kind': 'numbered', 'count': 2}, '1. One\n2. Two', '1. One\n3. Two'),
    ({'kind': 'repetition', 'count': 3, 'word': 'tea'}, 'tea tea Tea', 'tea tea'),
    ({'kind': 'sorting', 'count': 3, 'exact': 'a, b'}, 'a, b\n', 'a,b'),
    ({'kind': 'paragraphs', 'count': 2}, 'One.\n***\nTwo.', 'One.\n***\n'),
    ({'kind': 'without_commas', 'count': 1}, 'One and two.', 'One, two.'),
    ({'kind': 'beginning', 'count': 1, 'word': 'Today'}, 'Today, one.', 'One, today.'),
    ({'kind': 'adjectives', 'count': 2}, 'old, warm', 'old, old'),
]


@pytest.mark.parametrize(('asked', 'right', 'wrong'), INSTRUCTIONS)
def test_instructions_are_checked_to_the_letter(asked, right, wrong):
    """Red when a checker of one kind is loosened, tightened, or exchanged for another's."""
    item = Item('ifeval', '?', right, asked)
    assert item.check(right)
    assert not item.check(wrong)


def test_every_kind_of_instruction_has_a_case_above():
    """Red when a kind is added without one."""
    from eval.demo_models.tasks.ifeval_writers import WRITERS
    assert {writer.__name__ for writer in WRITERS} == {asked['kind'] for asked, _, _ in INSTRUCTIONS}


def test_training_never_sees_an_evaluation_prompt():
    """Red when the split is not asked, or asked of something else than the prompt."""
    prompts = [prompt for prompt, _ in training_pairs(random.Random(4), 400)]
    assert not any(map(is_eval_prompt, prompts))
    held_out = [item.prompt for task in TASKS for item in eval_set(task, 60)]
    assert all(map(is_eval_prompt, held_out))
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(prompts)


def test_a_class_of_first_quantities_is_kept_for_evaluation():
    """Red when training draws 11 k + 4, or evaluation does not."""
    rng = random.Random(0)
    assert not any(first_quantity(rng, 2, 60, False) % 11 == 4 for _ in range(2000))
    assert 0.4 < sum(first_quantity(rng, 2, 60, True) % 11 == 4 for _ in range(2000)) / 2000 < 0.7
    assert first_quantity(rng, 5, 6, True) in (5, 6)       # a range without such a number


def test_none_means_the_judged_tasks_in_order():
    """Red when `free` slips in, or the tasks are interleaved."""
    assert [item.task for item in eval_set(None, 2)] == [task for task in TASKS for _ in range(2)]
    assert eval_set('math', 3) == eval_set('math', 5)[:3]
    assert set(ALL_TASKS) - set(TASKS) == {'free'}


def test_bad_arguments_are_named():
    """Red when a wrong task gives an empty set, or free text a verdict."""
    with pytest.raises(ValueError, match="task='maths'"):
        eval_set('maths', 1)
    with pytest.raises(ValueError, match='per_task=-1'):
        eval_set('math', -1)
    with pytest.raises(ValueError, match="task='free'"):
        judge(Item('free', '?', ''), 'text')
    assert score([Item('free', '?', '')], ['text']) == [None]
