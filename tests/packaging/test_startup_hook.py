"""The start-up hook against a small stand-in for LMDeploy, in a process of its own."""
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARM = 'from lmdeploy_focus.startup_hook import arm; arm(); '


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code where `lmdeploy` is a stand-in and our CLI is `install`, a function body given by the test."""
    command_line = tmp_path / 'lmdeploy/cli'
    command_line.mkdir(parents=True)
    (tmp_path / 'lmdeploy/__init__.py').write_text('')
    (command_line / '__init__.py').write_text('from .entrypoint import run\n')
    (command_line / 'entrypoint.py').write_text("print('entrypoint')\ndef run(): print('stock command')\n")
    package = tmp_path / 'lmdeploy_focus'
    package.mkdir()
    for name in ('__init__.py', 'startup_hook.py'):
        (package / name).write_text((ROOT / 'lmdeploy_focus' / name).read_text())

    def run(code: str, install: str = "print('install')", **env: str) -> subprocess.CompletedProcess[str]:
        (package / 'cli.py').write_text(f'import sys\ndef install():\n    {install}\n')
        inherited = {name: value for name, value in os.environ.items() if not name.startswith('LMDEPLOY_FOCUS')}
        # -S: the hook that is installed in the interpreter of the tests must not answer for this one.
        code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}'
        return subprocess.run([sys.executable, '-S', '-c', code], env=inherited | env, capture_output=True, text=True,
                              timeout=60)

    return run


def output(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, ''), done.stderr
    return done.stdout.split('\n')[:-1]


def test_install_follows_the_command_line(python: Callable) -> None:
    """Red when our CLI is installed before LMDeploy's is there to be patched, never, or twice."""
    done = python(ARM + 'from lmdeploy.cli import run; run()',
                  install="print('install', callable(sys.modules['lmdeploy.cli.entrypoint'].run))")
    assert output(done) == ['entrypoint', 'install True', 'stock command']


def test_no_other_import_installs(python: Callable) -> None:
    """Red when the hook reacts to anything but the command line's own module."""
    assert output(python(ARM + 'import lmdeploy, json, lmdeploy_focus')) == []


def test_arming_twice_installs_once(python: Callable) -> None:
    """Red when two installations of the package, or an explicit call, lead to two finders."""
    assert output(python(ARM + ARM + 'import lmdeploy.cli')) == ['entrypoint', 'install']


def test_looking_for_the_module_does_not_use_up_the_hook(python: Callable) -> None:
    """Red when a tool's find_spec() on the command line disarms the hook."""
    look = "from importlib.util import find_spec; find_spec('lmdeploy.cli.entrypoint'); "
    done = python(ARM + look + 'import lmdeploy.cli')
    assert output(done) == ['entrypoint', 'install']


def test_a_missing_command_line_is_missed_as_ever(python: Callable, tmp_path: Path) -> None:
    """Red when the hook changes the error of an LMDeploy that lacks the module."""
    (tmp_path / 'lmdeploy/cli/entrypoint.py').unlink()
    done = python(ARM + 'import lmdeploy.cli')
    assert "ModuleNotFoundError: No module named 'lmdeploy.cli.entrypoint'" in done.stderr


def test_disabled(python: Callable) -> None:
    """Red when LMDEPLOY_FOCUS_DISABLE=1 leaves the finder armed."""
    assert output(python(ARM + 'import lmdeploy.cli', LMDEPLOY_FOCUS_DISABLE='1')) == ['entrypoint']


def test_a_failing_install_leaves_the_stock_command(python: Callable) -> None:
    """Red when a fault of ours takes the stock command down, is hidden, or fills the screen with a traceback."""
    done = python(ARM + 'from lmdeploy.cli import run; run()', install="raise RuntimeError('row moved')")
    assert (done.returncode, done.stdout) == (0, 'entrypoint\nstock command\n')
    assert done.stderr.startswith('lmdeploy-focus: ') and 'RuntimeError: row moved' in done.stderr
    assert done.stderr.count('\n') == 1


def test_install_may_end_the_command(python: Callable) -> None:
    """Red when the CLI's own refusal (exit status 2, one of our flags was given) is passed over as a fault."""
    done = python(ARM + 'from lmdeploy.cli import run; run()', install='sys.exit(2)')
    assert (done.returncode, done.stdout) == (2, 'entrypoint\n')
