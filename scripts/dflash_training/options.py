"""The command line of `train_dflash.py`: what a run is told, with bounds."""
import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What may change from one start of a run to the next; everything else would make it another run.
_FREE = ('output', 'device', 'save_every', 'evaluate_every', 'resume', 'compare', 'generation_batch')


@dataclass(frozen=True)
class Options:
    """What a run is told; the fields are the flags, whose help says what they mean."""

    target: str
    output: Path
    prompts: Path | None = None
    answers: Path | None = None
    chat: bool = False
    layers: int = 5
    block_size: int = 16
    target_layers: tuple[int, ...] | None = None
    mask_token: int | None = None
    steps: int = 6000
    batch: int = 16
    anchors: int = 64
    lr: float = 6e-4
    max_prompt_tokens: int = 512
    max_new_tokens: int = 512
    temperature: float = 1.0
    sampled_share: float = 0.3
    generation_batch: int = 64
    held_out: int = 64
    evaluate_every: int = 1000
    save_every: int = 250
    seed: int = 0
    dtype: str = 'auto'
    device: str = 'auto'
    resume: str = 'auto'
    compare: Path | None = None

    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must share with what it resumes, as JSON has them."""
        values = {name: value for name, value in asdict(self).items() if name not in _FREE}
        for name in ('prompts', 'answers'):
            values[name] = None if values[name] is None else str(Path(values[name]).resolve())
        layers = values['target_layers']
        return values | {'target_layers': None if layers is None else list(layers)}


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    bound = f'a whole number of at least {least}' + ('' if most is None else f' and at most {most}')

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f'it is {text!r}; it must be {bound}')
        return value
    return convert


def _real(bound: str, right: Callable[[float], bool]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and right(value)):
            raise argparse.ArgumentTypeError(f'it is {text!r}; it must be {bound}')
        return value
    return convert


def _layer_ids(text: str) -> tuple[int, ...]:
    parts = text.split(',')
    ids = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(ids) != len(parts) or any(i >= j for i, j in zip(ids, ids[1:], strict=False)):
        raise argparse.ArgumentTypeError(f'it is {text!r}; it must be layers of the target in ascending order, with '
                                         'commas between them, for example 1,3,5')
    return ids


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser('train_dflash.py', description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = _real('a number above 0', lambda value: value > 0)
    parser.add_argument('target', metavar='TARGET', help='folder or hub name of a Hugging Face causal language model')

    def add(flag: str, help: str, **settings: Any) -> None:
        default = getattr(Options, flag[2:].replace('-', '_'), None)
        shown = '' if default is None or default is False else '; default: %(default)s'
        parser.add_argument(flag, help=help + shown, default=default, **settings)

    add('--prompts', 'what the target answers: JSON lines (*.jsonl, *.json) with `messages` or `prompt`, else one text '
        'a line', type=Path, metavar='FILE')
    add('--answers', "instead of prompts, the target's answers: JSON lines with `prompt` or `messages`, and `answer`; "
        'text or token ids', type=Path, metavar='FILE')
    add('--chat', "put a bare prompt into the target's chat template, as one message of the user", action='store_true')
    parser.add_argument('--output', type=Path, metavar='DIR', required=True, help='folder of the drafter and of what '
                        'the training keeps: answers.jsonl, training.json, training_state.pt')
    add('--layers', 'layers of the drafter', type=_whole(1), metavar='N')
    add('--block-size', 'tokens of a block, the known one included', type=_whole(2, 256), metavar='N')
    add('--target-layers', 'layers of the target whose output the drafter sees, as 1,9,17; default: as many as the '
        'drafter has layers, evenly spread', type=_layer_ids, metavar='IDS')
    add('--mask-token', 'id of a token that never occurs in text; default: a reserved or unused one', type=_whole(0),
        metavar='ID')
    add('--steps', 'steps of the training', type=_whole(1), metavar='N')
    add('--batch', 'answers in a step', type=_whole(1), metavar='N')
    add('--anchors', 'drafted blocks of an answer in a step', type=_whole(1), metavar='N')
    add('--lr', 'peak learning rate; 1e-3 to 3e-3 suits small drafters', type=positive, metavar='RATE')
    add('--max-prompt-tokens', 'longer prompts are left out', type=_whole(1), metavar='N')
    add('--max-new-tokens', 'at most so many tokens of an answer', type=_whole(2), metavar='N')
    add('--temperature', 'of the sampled answers', type=positive, metavar='T')
    add('--sampled-share', 'share of the answers that are sampled; the others are greedy',
        type=_real('a number from 0 to 1', lambda value: 0 <= value <= 1), metavar='SHARE')
    add('--generation-batch', 'prompts answered at once', type=_whole(1), metavar='N')
    add('--held-out', 'prompts kept for measuring the acceptance length', type=_whole(1), metavar='N')
    add('--evaluate-every', 'steps between measurements; there is one at the end anyway', type=_whole(1), metavar='N')
    add('--save-every', 'steps between saves', type=_whole(1), metavar='N')
    add('--seed', 'of everything that is drawn', type=_whole(0, 2**31 - 1), metavar='N')
    add('--dtype', 'of the target and of activations; auto is bfloat16 on a GPU and float32 on a CPU',
        choices=('auto', 'float32', 'bfloat16'))
    add('--device', 'auto, cpu, cuda or cuda:N')
    add('--resume', 'auto goes on where OUTPUT stopped; always wants something to go on with; never refuses it',
        choices=('auto', 'always', 'never'))
    add('--compare', 'another drafter of the target, measured at the end in the same way', type=Path, metavar='DIR')
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Options:
    """Options of a command line; what is wrong in itself ends the process with status 2.

    Raises:
        ValueError: prompts and answers are both given or both missing, a file is not there, or OUTPUT is none.
    """
    options = Options(**vars(parser.parse_args(arguments)))
    if (options.prompts is None) == (options.answers is None):
        given = 'both are given' if options.prompts else 'neither is given'
        raise ValueError(f'--prompts and --answers: {given}; exactly one of them must be')
    for flag, path in (('--prompts', options.prompts), ('--answers', options.answers)):
        if path is not None and not path.is_file():
            raise ValueError(f'{flag} is {str(path)!r}; it must be a file')
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f'--output is {str(options.output)!r}; it must be a folder, or nothing yet')
    return options
