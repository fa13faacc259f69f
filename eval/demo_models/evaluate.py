"""Scores the three models by reference decoding, without a serving engine.

    python eval/demo_models/evaluate.py [--models DIR] [--prompts 200] [--max-new 384] [--out DIR]

Runs marked `few` use fewer prompts and at most 192 new tokens: they compare with each other only.
"""
import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.demo_models.checkpoint import FOLDER, load_decoder, load_draft
from eval.demo_models.decode_options import DecodeOptions
from eval.demo_models.network import Decoder, rope_table
from eval.demo_models.recall import Recall
from eval.demo_models.reference_ar import decode_ar
from eval.demo_models.reference_cache import pad_prompts
from eval.demo_models.reference_decode import decode
from eval.demo_models.reference_dflash import decode_dflash
from eval.demo_models.scores import by_task, summarise, summarise_blocks, summarise_drafts
from eval.demo_models.tasks import ALL_TASKS, TASKS, Item, eval_set
from eval.demo_models.tokenizer import encode_prompts, load_tokenizer

_LONGEST_PROMPT = 288
_FEW_MAX_NEW = 192
_FULL_RUNS = {'base 0.9': {}, 'focus 0.9': {'mode': 'focus'}, 'focus 0.8': {'mode': 'focus', 'threshold': 0.8}}
_FEW_RUNS = {
    'few base 0.9': {'score_always': True}, 'few base 0.8': {'threshold': 0.8}, 'few delayed 0.9': {'mode': 'delayed'},
    'few focus 0.9, reference visibility': {'mode': 'focus', 'kv_visible': 'reference'},
    'few focus 0.9, full commit': {'mode': 'focus', 'commit': 'full'}}
_FEW_RUNS |= {f'few base 0.9, L={length}': {'block_length': length} for length in (4, 8, 16)}
_FEW_RUNS |= {f'few {selection} K={keep}': {'mode': 'focus', 'selection': selection, 'keep': keep, 'paper_rules': False}
              for keep in (2, 4, 8) for selection in ('top', 'random', 'bottom')}


@dataclass(frozen=True)
class Questions:
    """Items and their prompts as token ids."""

    items: list[Item]
    prompts: list[list[int]]

    def first(self, per_task: int) -> 'Questions':
        """The first of each task."""
        chosen = []
        for task in ALL_TASKS:
            chosen += [index for index, item in enumerate(self.items) if item.task == task][:per_task]
        return Questions([self.items[index] for index in chosen], [self.prompts[index] for index in chosen])


def short_questions(tokenizer: Tokenizer, per_task: int, tasks: tuple[str, ...] = ALL_TASKS) -> Questions:
    """The first held-out items of each task whose prompt has at most 288 tokens."""
    items, prompts = [], []
    for task in tasks:
        candidates = eval_set(task, per_task * 2)
        encoded = encode_prompts(tokenizer, [item.prompt for item in candidates])
        short = [pair for pair in zip(candidates, encoded, strict=True) if len(pair[1]) <= _LONGEST_PROMPT][:per_task]
        items += [item for item, _ in short]
        prompts += [prompt for _, prompt in short]
    return Questions(items, prompts)


@torch.inference_mode()
def reference_loss(model: Decoder, tokenizer: Tokenizer, questions: Questions) -> dict:
    """Mean cross entropy of the reference answers a token, over at most 64 items a task."""
    few = questions.first(64)
    answers = [tokenizer.encode(item.reference + '<|im_end|>', add_special_tokens=False).ids for item in few.items]
    sequences = [(prompt + answer)[:768] for prompt, answer in zip(few.prompts, answers, strict=True)]
    width = max(map(len, sequences))
    ids, lengths = pad_prompts(sequences, width, model.device)
    cos, sin = rope_table(width, model.shape.head_size, model.shape.rope_theta, model.device)
    losses = []
    for row in range(len(sequences)):
        hidden, _ = model.trunk(ids[row:row + 1], cos[None], sin[None], 'causal', dtype=model.dtype)
        losses.append(F.cross_entropy(model.logits(hidden[0, :-1]).float(), ids[row, 1:], reduction='none'))
    position = torch.arange(1, width, device=model.device)[None]
    starts = torch.tensor([len(prompt) for prompt in few.prompts], device=model.device)
    counted = (position >= starts[:, None]) & (position < lengths[:, None])
    loss, count = (torch.stack(losses) * counted).sum(1).tolist(), counted.sum(1).tolist()
    return {'loss': by_task(few.items, lambda rows: round(sum(loss[i] for i in rows) / sum(count[i] for i in rows), 4)
                            if rows else None)}


class Evaluation:
    """Collects the summaries of runs, and a few answers of the full ones."""

    def __init__(self, questions: Questions):
        self.questions, self.summary, self.texts = questions, {}, {}

    def run(self, name: str, function: Callable[[], tuple[dict, list[str]]]) -> None:
        """Run, time, print and keep one row of the summary."""
        start = time.time()
        summary, texts = function()
        self.summary[name] = summary | {'seconds': round(time.time() - start, 1)}
        if len(texts) == len(self.questions.items):
            self.texts[name] = texts
        print(f'{name}: {json.dumps(self.summary[name])}', flush=True)

    def samples(self) -> list[dict]:
        """Three items of each judged task with the answers of every full run."""
        chosen = [index for task in TASKS
                  for index in [i for i, item in enumerate(self.questions.items) if item.task == task][:3]]
        items = self.questions.items
        return [{'task': items[index].task, 'prompt': items[index].prompt, 'reference': items[index].reference,
                 **{name: texts[index] for name, texts in self.texts.items()}} for index in chosen]


def _autoregressive(evaluation: Evaluation, models: Path, tokenizer: Tokenizer, max_new: int, device: str,
                    dtype: torch.dtype) -> None:
    """The target alone and with its drafter, both in fp32: in lower precision they need not agree."""
    questions = evaluation.questions
    model = load_decoder(models / 'ar', device)
    answers = decode_ar(model, questions.prompts, max_new)
    evaluation.run('ar', lambda: summarise(questions.items, answers, tokenizer))
    low = load_decoder(models / 'ar', device, dtype)
    evaluation.run('ar, reference answers', lambda: (reference_loss(low, tokenizer, questions), []))
    draft = load_draft(models / 'dflash', device)
    evaluation.run('ar + dflash', lambda: summarise_drafts(
        questions.items, decode_dflash(model, draft, questions.prompts, max_new), tokenizer, answers))


def evaluate(models: Path, per_task: int, max_new: int, few: int, device: str) -> tuple[dict, list[dict]]:
    """All runs: (summaries by name, sample answers). bf16 on a GPU, fp32 on a CPU."""
    torch.set_float32_matmul_precision('highest')
    dtype = torch.bfloat16 if device == 'cuda' else torch.float32
    tokenizer = load_tokenizer(models / 'ar')
    evaluation = Evaluation(short_questions(tokenizer, per_task))
    _autoregressive(evaluation, models, tokenizer, max_new, device, dtype)
    model = load_decoder(models / 'sdar', device, dtype)
    runs = [(name, fields, evaluation.questions, max_new) for name, fields in _FULL_RUNS.items()]
    fewer, fewer_new = evaluation.questions.first(few), min(max_new, _FEW_MAX_NEW)
    runs += [(name, fields, fewer, fewer_new) for name, fields in _FEW_RUNS.items()]
    for name, fields, questions, limit in runs:
        options = DecodeOptions(max_new=limit, partial_block='decode', **fields)

        def run(questions: Questions = questions, options: DecodeOptions = options) -> tuple[dict, list[str]]:
            recall = Recall(model.device) if options.score_always else None
            answers = decode(model, questions.prompts, options, recall)
            summary, texts = summarise_blocks(questions.items, answers, tokenizer)
            return (summary | {'recall': recall.shares()} if recall else summary), texts
        evaluation.run(name, run)
    return evaluation.summary, evaluation.samples()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', type=Path, default=FOLDER, help='folder that holds ar, sdar and dflash')
    parser.add_argument('--prompts', type=int, default=200, help='items of each task')
    parser.add_argument('--few', type=int, default=60, help='items of each task in the runs marked few')
    parser.add_argument('--max-new', type=int, default=384)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--out', type=Path, help='folder for evaluation.json and samples.json')
    arguments = parser.parse_args()
    summary, samples = evaluate(arguments.models, arguments.prompts, arguments.max_new, arguments.few, arguments.device)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / 'evaluation.json').write_text(json.dumps(summary, indent=1))
        (arguments.out / 'samples.json').write_text(json.dumps(samples, indent=1))


if __name__ == '__main__':
    main()
