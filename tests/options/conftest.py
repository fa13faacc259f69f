"""The stock command line with our options, in this process; the engine is never started."""
import importlib
import json
import sys
from pathlib import Path

import pytest

from lmdeploy_focus import cli, patches

DEMO = Path(__file__).resolve().parents[2] / 'eval/demo_models'


class Started(BaseException):
    """Raised where LMDeploy would begin to load the model, with what it would begin with."""

    def __init__(self, keywords):
        self.config = keywords['backend_config']
        self.keywords = keywords


class CommandLine:
    """Runs `lmdeploy ...` up to the engine."""

    def __init__(self, monkeypatch, capsys):
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._entrypoint = importlib.import_module('lmdeploy.cli.entrypoint')

    def run(self, *words):
        """What the engine would be started with."""
        with pytest.raises(Started) as started:
            self._run(words)
        return started.value

    def refused(self, *words):
        """The last line on stderr of a command that exits with status 2."""
        with pytest.raises(SystemExit) as exited:
            self._run(words)
        printed = self._capsys.readouterr().err
        assert exited.value.code == 2, printed
        return printed.strip().splitlines()[-1]

    def help(self, *words):
        """What `--help` prints."""
        with pytest.raises(SystemExit) as exited:
            self._run([*words, '--help'])
        assert exited.value.code == 0
        return self._capsys.readouterr().out

    def _run(self, words):
        forget_parsers()
        self._monkeypatch.setattr(sys, 'argv', ['lmdeploy', *map(str, words)])
        self._monkeypatch.setenv('COLUMNS', '200')
        self._entrypoint.run()


def forget_parsers():
    """LMDeploy adds its sub-commands at every run, which argparse allows only once a process."""
    for module, owner in (('lmdeploy.cli.cli', 'CLI'), ('lmdeploy.cli.serve', 'SubCliServe'),
                          ('lmdeploy.cli.lite', 'SubCliLite')):
        subparsers = getattr(importlib.import_module(module), owner).subparsers
        for name in set(subparsers.choices) - {'serve', 'lite'}:
            del subparsers.choices[name]


@pytest.fixture
def command_line(monkeypatch, capsys):
    def start(*args, **keywords):
        raise Started(keywords)

    def get_task(backend, model_path, trust_remote_code, backend_config):
        raise Started({'backend_config': backend_config, 'backend': backend})

    def get_model(*args, **kwargs):
        raise AssertionError('the model would be downloaded')

    monkeypatch.setattr(importlib.import_module('lmdeploy.api'), 'Pipeline', start)
    monkeypatch.setattr(importlib.import_module('lmdeploy.serve.openai.api_server'), 'get_task', get_task)
    monkeypatch.setattr('lmdeploy.utils.get_model', get_model)
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    cli.install()
    yield CommandLine(monkeypatch, capsys)
    patches.undo(patches.rows('cli') + patches.rows('boundary'))
    forget_parsers()


@pytest.fixture
def demo():
    """Folders of the demo checkpoints: 'sdar' is block diffusion, 'ar' autoregressive."""
    return DEMO


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint's config.json, by default the demo SDAR's, and gives its folder."""

    def write(name='model', **changes):
        config = json.loads((DEMO / 'sdar/config.json').read_text())
        config.update(changes)
        config = {key: value for key, value in config.items() if value != 'absent'}
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text(json.dumps(config))
        return folder

    return write
