"""The real command in processes of its own: what only a whole process shows."""
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# `lmdeploy` as its console script runs it, with an LMDeploy that does not fit, and a `chat` that does not start
SCRIPT = """
import sys
sys.argv = ['lmdeploy', *sys.argv[1:]]
{change}
from lmdeploy.cli import run
from lmdeploy.cli.cli import CLI
def chat(args): sys.exit(f'stock chat of {{args.model_path}}')
CLI.chat = chat
run()
"""
OUTSIDE = SCRIPT.format(change="import lmdeploy.version; lmdeploy.version.__version__ = '0.19.0'")
MOVED = SCRIPT.format(change="from lmdeploy_focus.patches import rows; "
                             "rows('cli')[-1].written_for['lmdeploy.cli.cli:CLI'] = 'sha256:0'")


def run(*words):
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize('command', [('lmdeploy', ), ('lmdeploy-focus', )], ids=['lmdeploy', 'lmdeploy-focus'])
def test_a_wrong_value(command, demo):
    """Red when the installed commands do not have our options, or do not exit with status 2."""
    done = run(BIN / command[0], 'chat', demo / 'sdar', '--focus', '--dllm-confidence-threshold', '1.1')
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        'lmdeploy: error: --dllm-confidence-threshold (dllm_confidence_threshold) is 1.1; it must be above 0 and at '
        'most 1')


@pytest.mark.parametrize('program, told', [
    (OUTSIDE, 'lmdeploy-focus needs lmdeploy>=0.18,<0.19, but lmdeploy 0.19.0 is installed'),
    (MOVED, 'lmdeploy.cli.cli:CLI has moved'),
], ids=['outside the pin', 'moved source'])
def test_an_lmdeploy_that_does_not_fit(program, told, demo):
    """Red when a command with our options runs on, shows a traceback, or fails with argparse's 'unrecognized'."""
    done = run(sys.executable, '-c', program, 'chat', demo / 'sdar', '--focus')
    assert done.returncode == 2
    assert 'Traceback' not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith('lmdeploy: error: ')
    assert told in last


def test_an_lmdeploy_that_does_not_fit_runs_without_our_options(demo):
    """Red when the stock command line suffers from our package's being out of date."""
    done = run(sys.executable, '-c', MOVED, 'chat', demo / 'sdar')
    assert (done.returncode, done.stderr.strip()) == (1, f'stock chat of {demo / "sdar"}')
