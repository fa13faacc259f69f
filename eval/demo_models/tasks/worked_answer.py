"""How a word problem or an algebra problem is asked and answered: worked steps, then ``#### answer``."""
import random
import re

from .split import pick

PROMPT_ENDS = ['', '', '', ' Think step by step.', ' Show your work.',
               ' Solve it and give the final answer after ####.']
_OPENINGS = ['', '', '', "Let's solve it step by step.", "Let's think.", 'Here is the solution.',
             'We go through the story.']
_CLOSINGS = ['', '', 'The answer is {answer}.', 'So the answer is {answer}.', 'Therefore the result is {answer}.',
             'In the end we get {answer}.']
_EQUATION = re.compile(r'-?\d[\d +*/()-]*= -?\d+')
_FINAL_ANSWER = re.compile(r'####\s*(-?\d+)')


def _body(rng: random.Random, steps: list[str]) -> str:
    style = rng.random()
    if style < 0.35:
        return ' '.join(steps)
    if style < 0.7:
        return '\n'.join(steps)
    if style < 0.85:
        return '\n'.join(f'{index + 1}. {step}' for index, step in enumerate(steps))
    return '\n'.join(f'Step {index + 1}: {step}' for index, step in enumerate(steps))


def worked_answer(rng: random.Random, steps: list[str], answer: int) -> str:
    """The text of an answer: steps in one of four styles, perhaps a check, and the final line."""
    body = _body(rng, steps)
    opening, closing = pick(rng, _OPENINGS), pick(rng, _CLOSINGS).format(answer=answer)
    text = (opening + '\n' if opening else '') + body
    if closing:
        text += ('\n' if rng.random() < 0.6 else ' ') + closing
    if rng.random() < 0.35:
        equations = [equation.strip() for equation in _EQUATION.findall(' '.join(steps))]
        if equations:
            separator = pick(rng, ['; ', ', ', '\n'])
            text += pick(rng, ['\nCheck: ', '\nLet me verify the steps again: ', '\nTo double check, we computed '])
            text += ('\n' if separator == '\n' else '') + separator.join(equations)
            text += pick(rng, ['. All steps are correct.', '. Everything fits.', '.'])
    return text + f'\n#### {answer}'


def final_answer_is(answer: str, text: str) -> bool:
    """Whether the first ``#### number`` of the text is the answer."""
    found = _FINAL_ANSWER.search(text)
    return found is not None and found.group(1) == answer
