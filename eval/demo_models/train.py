"""Trains the three demo models on one GPU in about ten minutes, from nothing.

    python eval/demo_models/train.py --out DIR [--phases tok,ar,sdar,dflash,eval]
    python eval/demo_models/train.py --out DIR --smoke      # every code path on a CPU, minutes

A phase reads what the phases before it left in DIR, so a run can be resumed with --phases.
"""
import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.demo_models.evaluate import evaluate
from eval.demo_models.tokenizer import TOKENIZER_FILES, save_tokenizer, train_tokenizer
from eval.demo_models.training.ar import train_ar
from eval.demo_models.training.dflash import train_dflash
from eval.demo_models.training.loop import Journal
from eval.demo_models.training.producer import Producer
from eval.demo_models.training.rows import Rows
from eval.demo_models.training.sdar import train_sdar
from eval.demo_models.training.settings import Settings

_MODELS = {'ar': train_ar, 'sdar': train_sdar, 'dflash': train_dflash}
_PHASES = ('tok', *_MODELS, 'eval')
# Seconds-long phases, tiny batches.
_SMOKE = {'minutes_ar': 0.2, 'minutes_sdar': 0.2, 'minutes_dflash': 0.2, 'length': 256, 'batch_ar': 4, 'batch_sdar': 8,
          'batch_dflash': 4, 'anchors': 8, 'policy_batch': 8, 'policy_new': 48, 'megatokens': 0.5, 'shard_rows': 64,
          'rows_at_start': 64, 'compile': False, 'device': 'cpu'}


def make_tokenizer(settings: Settings, smoke: bool) -> None:
    """Phase `tok`: the same tokenizer beside each model."""
    documents, megabytes = (3000, 0.3) if smoke else (30000, 3.0)
    tokenizer = train_tokenizer(documents, megabytes, settings.seed + 1)
    for model in _MODELS:
        save_tokenizer(tokenizer, settings.out / model)


def train_models(settings: Settings, phases: list[str], workers: int, journal: Journal) -> None:
    """Phases `ar`, `sdar` and `dflash`, over one corpus that is generated meanwhile."""
    shards = max(2, round(settings.megatokens * 1e6 / (settings.shard_rows * settings.length)))
    with tempfile.TemporaryDirectory(prefix='demo_shards_') as folder:
        producer = Producer(settings.out / 'ar' / TOKENIZER_FILES[0], Path(folder), settings.seed, workers,
                            settings.shard_rows, settings.length, shards)
        try:
            rows = Rows(settings.length, shards * settings.shard_rows, settings.device, producer)
            for name, train_model in _MODELS.items():
                if name in phases:
                    train_model(settings, rows, journal)
                    journal.write(settings.out)
                    torch._dynamo.reset()
            journal.entries['corpus'] = {'megatokens': round(rows.count * settings.length / 1e6, 1),
                                         'passes': rows.passes}
        finally:
            producer.stop()


def parse() -> tuple[Settings, argparse.Namespace]:
    """Settings of the run, and the rest of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--phases', default=','.join(_PHASES), help='comma-separated, default: %(default)s')
    parser.add_argument('--smoke', action='store_true', help='a dry run on a CPU')
    parser.add_argument('--workers', type=int, default=max(1, (os.cpu_count() or 2) - 2),
                        help='processes that generate text, default: %(default)s')
    parser.add_argument('--no-compile', action='store_false', dest='compile')
    parser.add_argument('--out', type=Path, required=True)
    for field in fields(Settings):
        if field.name not in ('out', 'device', 'compile'):
            parser.add_argument('--' + field.name.replace('_', '-'), type=type(field.default), default=field.default,
                                help='default: %(default)s')
    arguments = parser.parse_args()
    arguments.phases = arguments.phases.split(',')
    for phase in arguments.phases:
        if phase not in _PHASES:
            parser.error(f'--phases {phase}: expected some of {", ".join(_PHASES)}')
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings) if field.name != 'device'}
    settings = Settings(device='cuda' if torch.cuda.is_available() else 'cpu', **given)
    return (replace(settings, **_SMOKE) if arguments.smoke else settings), arguments


def main() -> None:
    """Command line."""
    settings, arguments = parse()
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision('high')
    torch._dynamo.config.recompile_limit = 64
    journal = Journal()
    journal.entries['settings'] = {name: str(value) for name, value in asdict(settings).items()}
    if 'tok' in arguments.phases:
        make_tokenizer(settings, arguments.smoke)
        journal.log('tokenizer trained')
    if set(arguments.phases) & set(_MODELS):
        train_models(settings, arguments.phases, arguments.workers, journal)
    journal.write(settings.out)
    if 'eval' in arguments.phases:
        prompts, max_new, few = (2, 32, 1) if arguments.smoke else (200, 384, 60)
        summary, samples = evaluate(settings.out, prompts, max_new, few, settings.device)
        (settings.out / 'evaluation.json').write_text(json.dumps(summary, indent=1))
        (settings.out / 'samples.json').write_text(json.dumps(samples, indent=1))
    journal.log('finished')


if __name__ == '__main__':
    main()
