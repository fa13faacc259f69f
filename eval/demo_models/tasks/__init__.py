"""Five synthetic tasks: questions, answers and checkers.

Everything is a function of a seed. `eval_set` gives held-out prompts that training never sees (`split.py`), `score` and
`judge` decide whether answers are right.
"""
from .items import Item, judge, score
from .registry import ALL_TASKS, TASKS, eval_set, sample, training_pairs

__all__ = ['ALL_TASKS', 'TASKS', 'Item', 'eval_set', 'judge', 'sample', 'score', 'training_pairs']
