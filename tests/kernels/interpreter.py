"""Checks of a kernel in the Triton interpreter."""
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def run_interpreted(checks: ModuleType) -> None:
    """Run the checks, a module of this folder, in a process of their own: the interpreter must be chosen before triton
    is imported, and a test process builds engines.

    Raises:
        AssertionError: a check failed; with what the process wrote.
    """
    name = checks.__name__.rpartition('.')[2]
    done = subprocess.run([sys.executable, '-m', f'tests.kernels.{name}'], cwd=ROOT,
                          env=os.environ | {'TRITON_INTERPRET': '1'}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
