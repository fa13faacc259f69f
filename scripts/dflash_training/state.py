"""What a training keeps in OUTPUT to go on after a stop: its settings, and the state of the last save."""
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from .layout import write_atomically
from .options import Options
from .plan import Plan

SETTINGS, STATE, ANSWERS, JOURNAL = 'settings.json', 'training_state.pt', 'answers.jsonl', 'training.json'


def open_output(options: Options, plan: Plan) -> bool:
    """Make OUTPUT, or make sure that it holds a stopped run of the same settings.

    Returns:
        Whether there is something to go on with.

    Raises:
        ValueError: the settings differ, or `--resume` forbids what is there; the message has option, value and bound.
    """
    source = options.prompts or options.answers
    assert source is not None
    settings = {**options.fixed(), 'mask_token': plan.mask_token, 'target_layers': list(plan.target_layers),
                'sha256 of the prompts': hashlib.sha256(source.read_bytes()).hexdigest()}
    path = options.output / SETTINGS
    found = path.exists()
    if options.resume == 'always' and not found:
        raise ValueError(f'--resume is always; --output must then hold a stopped training, and {str(options.output)!r} '
                         'does not')
    if options.resume == 'never' and options.output.exists() and any(options.output.iterdir()):
        raise ValueError(f'--resume is never; --output must then be empty, and {str(options.output)!r} is not')
    if found:
        before = json.loads(path.read_text(encoding='utf-8'))
        for name, value in settings.items():
            if before.get(name) != value:
                raise ValueError(f'--{name.replace("_", "-")} is {value!r}; it must be {before.get(name)!r}, as in the '
                                 f'training in {str(options.output)!r}, or --output another folder')
        return True
    if (options.output / 'config.json').exists() or (options.output / 'model.safetensors').exists():
        raise ValueError(f'--output is {str(options.output)!r}, which holds a model that is not of this command; it '
                         'must be another folder')
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(settings, indent=1) + '\n')
    return False


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a state; the file is the last one or the whole new one at any time."""
    unfinished = folder / (STATE + '.unfinished')
    torch.save(state, unfinished)
    os.replace(unfinished, folder / STATE)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The state of the last save, on the CPU, where AdamW counts its steps on any device; None if there is none."""
    path = folder / STATE
    return torch.load(path, map_location='cpu', weights_only=True) if path.exists() else None
