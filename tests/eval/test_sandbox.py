"""Generated code is run, but not trusted."""
import pytest

from eval.demo_models.tasks import Item, score

CASE = {'name': 'f', 'reference': 'def f(xs):\n    return sum(xs)\n', 'tests': [[[1, 2]], [[4]]]}

ENDLESS = ('def f(xs):\n    while True:\n        try:\n            while True:\n                pass\n        {}:\n'
           '            pass')

RIGHT = {
    'plain': 'def f(xs):\n    return sum(xs)',
    'loop': 'def f(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total',
    'with its own helper': 'def g(x):\n    return x\n\ndef f(xs):\n    return sum(g(x) for x in xs)',
    # Right only if more than a GiB is an error.
    'falls back without memory': 'def f(xs):\n    try:\n        big = "x" * (1100 << 20)\n    except Exception:\n'
                                 '        return sum(xs)\n    return len(big)',
    # Right only if the reference gets a copy of its own.
    'empties its argument': 'def f(xs):\n    total = 0\n    while xs:\n        total += xs.pop()\n    return total',
}
WRONG = {
    'another value': 'def f(xs):\n    return max(xs)',
    'another name': 'def g(xs):\n    return sum(xs)',
    'no code': '',
    'syntax': 'def f(xs:\n    return sum(xs)',
    'null byte': 'def f(xs):\n    return sum(xs)\0',
    'import': 'import os\ndef f(xs):\n    return sum(xs)',
    'import never reached': 'def f(xs):\n    if not xs:\n        import os\n    return sum(xs)',
    'import inside': 'def f(xs):\n    from math import fsum\n    return sum(xs)',
    'import function': 'def f(xs):\n    __import__("os")\n    return sum(xs)',
    'file': 'def f(xs):\n    open("/etc/hostname")\n    return sum(xs)',
    'eval': 'def f(xs):\n    return eval("sum(xs)")',
    'private attribute': 'def f(xs):\n    xs.__class__\n    return sum(xs)',
    'getattr': 'def f(xs):\n    getattr(xs, "__class__")\n    return sum(xs)',
    'print': 'def f(xs):\n    print(xs)\n    return sum(xs)',
    'raises': 'def f(xs):\n    raise ValueError(1)',
    'recursion': 'def f(xs):\n    return f(xs)',
    'endless': 'while True:\n    pass\ndef f(xs):\n    return sum(xs)',
    'endless, catches errors': ENDLESS.format('except Exception'),
    'endless, catches all': ENDLESS.format('except'),
}


def test_what_is_right_and_what_is_refused():
    """Red when a forbidden thing runs, when an error or an endless loop stops the others from being judged, or when
    harmless code is refused. All in one call, as in an evaluation."""
    codes = list(RIGHT.values()) + list(WRONG.values())
    answers = [f'Here it is:\n```python\n{code}\n```\nIt adds.' for code in codes]
    verdicts = score([Item('code', '?', '', CASE)] * len(codes), answers)
    found = dict(zip([*RIGHT, *WRONG], verdicts, strict=True))
    assert found == dict.fromkeys(RIGHT, True) | dict.fromkeys(WRONG, False)


@pytest.mark.parametrize(('answer', 'right'), [
    ('```python\n' + RIGHT['plain'], True),                         # the closing fence is missing
    ('```\n' + RIGHT['plain'] + '\n```', True),                     # no language
    (RIGHT['plain'], False),                                        # no fence
    ('```python\npass\n```\n```python\n' + RIGHT['plain'] + '\n```', False)])
def test_the_first_code_block_counts(answer, right):
    """Red when code outside a block is run, or a later block."""
    assert score([Item('code', '?', '', CASE)], [answer]) == [right]
