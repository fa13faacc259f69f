"""Figures of a set of answers, by task."""
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from .decode_options import Decoded
from .reference_dflash import Drafted
from .tasks import ALL_TASKS, Item, score

Answer = tuple[list[int], bool]
ByTask = dict[str, float | None]


def by_task(items: Sequence[Item], figure: Callable[[list[int]], float | None]) -> ByTask:
    """The figure of each task's indices."""
    return {task: figure([index for index, item in enumerate(items) if item.task == task]) for task in ALL_TASKS}


def ratio(items: Sequence[Item], above: Sequence[float], below: Sequence[float]) -> ByTask:
    """Quotient of two sums by task, and under 'all' over everything."""
    def quotient(indices: Sequence[int]) -> float:
        total = sum(below[index] for index in indices)
        return round(sum(above[index] for index in indices) / max(1, total), 3)

    return by_task(items, quotient) | {'all': quotient(range(len(items)))}


def summarise(items: Sequence[Item], answers: Sequence[Answer], tokenizer: Tokenizer) -> tuple[dict, list[str]]:
    """Accuracy (None without a checker), share that stopped by itself and mean length; and the answers as text."""
    texts = tokenizer.decode_batch([tokens for tokens, _ in answers], skip_special_tokens=True)
    verdicts = score(items, texts)

    def accuracy(indices: list[int]) -> float | None:
        judged = [verdicts[index] for index in indices if verdicts[index] is not None]
        return round(sum(judged) / len(judged), 4) if judged else None

    def mean(values: Sequence[float], digits: int) -> ByTask:
        return by_task(items, lambda indices: round(sum(values[i] for i in indices) / max(1, len(indices)), digits))

    summary = {'accuracy': by_task(items, accuracy), 'finished': mean([stopped for _, stopped in answers], 4),
               'mean_length': mean([len(tokens) for tokens, _ in answers], 1)}
    return summary, texts


def summarise_blocks(items: Sequence[Item], answers: Sequence[Decoded], tokenizer: Tokenizer) -> tuple[dict, list[str]]:
    """The same for block diffusion, with what the answers cost.

    tokens_per_step: decoded tokens (padding after the stop token included) a denoising step, commits not counted.
    useful_tokens_per_forward: tokens up to and with the stop token a forward, commits counted.
    rows_per_token, prefix_rows_per_token: tokens through layers 2 and later, through layers 0 and 1, a decoded token.
    """
    summary, texts = summarise(items, [(answer.tokens, answer.stopped) for answer in answers], tokenizer)
    counters = [answer.counters for answer in answers]
    steps, decoded = [c.steps for c in counters], [c.decoded_tokens for c in counters]
    forwards = [c.steps + c.commit_steps for c in counters]
    useful = [len(answer.tokens) + 1 for answer in answers]
    summary |= {'tokens_per_step': ratio(items, decoded, steps),
                'useful_tokens_per_forward': ratio(items, useful, forwards),
                'rows_per_token': ratio(items, [c.suffix_rows for c in counters], decoded),
                'prefix_rows_per_token': ratio(items, [c.prefix_rows for c in counters], decoded)}
    return summary, texts


def summarise_drafts(items: Sequence[Item], answers: Sequence[Drafted], tokenizer: Tokenizer,
                     target: Sequence[Answer]) -> tuple[dict, list[str]]:
    """The same for speculation: acceptance length (tokens a verification), share of answers equal to the target's."""
    summary, texts = summarise(items, [(answer.tokens, answer.stopped) for answer in answers], tokenizer)
    equal = [answer.tokens == tokens for answer, (tokens, _) in zip(answers, target, strict=True)]
    summary |= {'acceptance_length': ratio(items, [a.verified for a in answers], [a.steps for a in answers]),
                'exact': round(sum(equal) / len(equal), 4)}
    return summary, texts
