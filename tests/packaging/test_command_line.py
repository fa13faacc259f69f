"""The stock `lmdeploy` command and the fallback command, with the package installed."""
import sysconfig
from pathlib import Path

import pytest

STOCK = Path(sysconfig.get_path('scripts'), 'lmdeploy')
# An sdist is installed through the wheel that is built from it: the two that differ are enough for slow commands.
of_wheel = pytest.mark.parametrize('installed', ['wheel'], indirect=True, scope='session')
of_wheel_and_editable = pytest.mark.parametrize('installed', ['wheel', 'editable'], indirect=True, scope='session')


@of_wheel_and_editable
@pytest.mark.parametrize('command', ['chat', 'serve api_server'])
def test_stock_command_has_our_options(installed, command: str) -> None:
    """Red when the start-up line is missing from a way to install, or the hook no longer reaches the stock parser."""
    done = installed.command(STOCK, *command.split(), '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert '--focus ' in done.stdout and '--focus-alpha' in done.stdout


@of_wheel
def test_disabled_stock_command_has_none(installed) -> None:
    """Red when LMDEPLOY_FOCUS_DISABLE=1 leaves anything of ours in the stock command."""
    done = installed.command(STOCK, 'chat', '--help', LMDEPLOY_FOCUS_DISABLE='1')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'focus' not in done.stdout.lower()


@of_wheel_and_editable
def test_fallback_command_needs_no_hook(installed) -> None:
    """Red when `lmdeploy-focus` is not installed, or works only where the start-up line has run."""
    unhooked = ("import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'CliFinder']; "
                "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')")
    done = installed.command('-c', unhooked, installed.home / 'bin/lmdeploy-focus', 'chat', '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert '--focus ' in done.stdout and '--focus-alpha' in done.stdout
