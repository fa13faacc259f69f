"""Train a DFlash drafter (arXiv 2602.06036) for a Hugging Face causal language model, on one device, from prompts.

    python scripts/train_dflash.py Qwen/Qwen3-4B --prompts prompts.jsonl --output drafter

The target answers the prompts itself; the drafter learns to draft those answers. A run that was stopped goes on when
the same command is given again. OUTPUT is a drafter for `--dflash OUTPUT` at every save.
"""
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.dflash_training import options as command_line  # noqa: E402

STOPPED = 130


def run(options: command_line.Options) -> int:
    """Check everything, then answer, train and measure; returns the exit status.

    Raises:
        ValueError: an option, a file or the target is wrong; before any work.
    """
    import torch

    from lmdeploy_focus.dflash.targets import TARGETS
    from scripts.dflash_training import layout, plan, prompts, state
    device = _device(options.device)
    config, tokenizer, generation = plan.read_target(options.target)
    planned = plan.make_plan(options, config, tokenizer, generation)
    layout.check_plan(planned, options.target)
    encoder = prompts.Encoder(tokenizer, options.chat, planned.shape.vocabulary)
    if options.answers:
        samples = prompts.read_samples(options.answers, '--answers', encoder, options.max_prompt_tokens,
                                       planned.stop_ids[0])
    else:
        assert options.prompts is not None
        samples = prompts.read_samples(options.prompts, '--prompts', encoder, options.max_prompt_tokens, None)
    _check_mask(samples, planned.mask_token)
    training, held_out = prompts.hold_out(samples, options.held_out, options.seed)
    other = layout.load_draft(options.compare, options.target, planned, device) if options.compare else None
    resumed = state.open_output(options, planned)
    low = 'bfloat16' if device.startswith('cuda') else 'float32'
    dtype = getattr(torch, low if options.dtype == 'auto' else options.dtype)

    from scripts.dflash_training.target import load_target
    _say(f'{"going on with" if resumed else "new"} training in {options.output}: {planned.shape.layers} layers, block '
         f'{planned.block_size}, target layers {list(planned.target_layers)}, mask token {planned.mask_token}; '
         f'{len(training)} prompts and {len(held_out)} held out')
    if not set(config.architectures or []) & set(TARGETS):
        _say(f'note: lmdeploy-focus serves DFlash for {", ".join(TARGETS)} only; the target is '
             f'{config.architectures}')
    target = load_target(options.target, planned, device, dtype)
    return _work(options, target, training, held_out, other)


def _work(options: command_line.Options, target: Any, training: list[Any], held_out: list[Any], other: Any) -> int:
    """The two stages and the comparison.

    Args:
        target: a `Target`; training, held_out: `Sample`s, the second without answers.
        other: the drafter to be compared and its mask token, or None.
    """
    import torch

    from scripts.dflash_training import layout, state
    from scripts.dflash_training.acceptance import measure, report
    from scripts.dflash_training.answers import answer_prompts
    from scripts.dflash_training.trainer import Trainer
    answers = options.output / state.ANSWERS
    if options.answers:
        _, held_out = answer_prompts(target, [], held_out, options, answers)
    else:
        training, held_out = answer_prompts(target, training, held_out, options, answers)
    longest = options.max_new_tokens
    training = [replace(sample, answer=sample.answer[:longest]) for sample in training if len(sample.answer) > 1]
    _check_mask([*training, *held_out], target.plan.mask_token)
    if not training or not any(len(sample.answer) > 1 for sample in held_out):
        raise ValueError(f'--{"answers" if options.answers else "prompts"}: no answer has two tokens; some must have')
    torch.manual_seed(options.seed)
    draft = layout.new_draft(target.plan).to(target.device).train()
    trainer = Trainer(target, draft, training, held_out, options)
    if trainer.resume():
        _say(f'going on after step {trainer.step}')
    if not trainer.run():
        _say(f'stopped and saved after step {trainer.step}; the same command goes on')
        return STOPPED
    more = {}
    if other is not None:
        found = measure(target, other[0], held_out, other[1], options.max_new_tokens, options.generation_batch)
        more['compared'] = {'drafter': str(options.compare), **report(found)}
        _say(f'{options.compare}: acceptance length {found.length:.3f} on the same prompts')
    trainer.write_journal(**more)
    _say(f'{options.output} is the drafter: acceptance length {trainer.acceptance[-1]["acceptance_length"]}')
    return 0


def _device(name: str) -> str:
    import torch
    if name == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'cpu'
    kind, _, index = name.partition(':')
    if kind not in ('cpu', 'cuda') or (index and not index.isdecimal()) or (kind == 'cpu' and index):
        raise ValueError(f'--device is {name!r}; it must be auto, cpu, cuda or cuda:N')
    if kind == 'cuda' and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f'--device is {name!r}; there are {torch.cuda.device_count()} CUDA GPUs here')
    return name


def _check_mask(samples: Iterable[Any], mask: int) -> None:
    for sample in samples:
        if mask in sample.prompt or mask in sample.answer:
            raise ValueError(f'--mask-token is {mask}, which occurs in a prompt or an answer; it must be a token that '
                             'never occurs in text')


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: exit status 0 at the end, 130 when stopped, 2 for wrong input."""
    parser = command_line.make_parser(__doc__)
    try:
        return run(command_line.parse(parser, arguments))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        _say('stopped; the same command goes on')
        return STOPPED


if __name__ == '__main__':
    sys.exit(main())
