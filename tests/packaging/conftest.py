"""Throw-away environments with the package installed from a wheel, an sdist and a checkout.

Nothing is downloaded: each environment sees the site-packages of the interpreter that runs the tests through a path
line, which does not run that folder's own `.pth` files, so only the installation under test is active.
"""
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ('wheel', 'sdist', 'editable')


@dataclass(frozen=True)
class Environment:
    """One virtual environment; `source` is the checkout that was installed, `elsewhere` a folder outside of it."""
    home: Path
    source: Path
    elsewhere: Path
    kind: str = 'bare'

    @property
    def site(self) -> Path:
        return next((self.home / 'lib').glob('python3*/site-packages'))

    @property
    def package(self) -> Path:
        return (self.source if self.kind == 'editable' else self.site) / 'lmdeploy_focus'

    def command(self, *args: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python with `args`; whatever it answers is returned."""
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith(('PYTHON', 'LMDEPLOY_FOCUS'))}
        return subprocess.run([self.home / 'bin/python', *args], cwd=cwd or self.elsewhere, env=inherited | env,
                              capture_output=True, text=True, timeout=120)

    def pip(self, *args: str | Path) -> None:
        done = self.command('-m', 'pip', *args)
        assert done.returncode == 0, done.stdout + done.stderr

    def python(self, code: str, cwd: Path | None = None, **env: str) -> Any:
        """Run `code`, which must print one JSON value and nothing on stderr; that value is returned."""
        done = self.command('-c', code, cwd=cwd, **env)
        assert (done.returncode, done.stderr) == (0, ''), done.stdout + done.stderr
        return json.loads(done.stdout)


def new_environment(folder: Path, source: Path, kind: str = 'bare') -> Environment:
    home, elsewhere = folder / 'venv', folder / 'elsewhere'
    elsewhere.mkdir(parents=True)
    venv.create(home, symlinks=True, with_pip=False)
    environment = Environment(home, source, elsewhere, kind)
    (environment.site / 'outer.pth').write_text(sysconfig.get_path('purelib') + '\n')
    return environment


def install(environment: Environment, *what: str | Path) -> None:
    environment.pip('install', '-q', '--no-deps', '--no-build-isolation', '--ignore-installed', '--no-index', *what)


def copy_checkout(target: Path) -> Path:
    """Copy what packaging looks at, so that no build leaves a trace in the checkout or sees an earlier build's."""
    skipped = shutil.ignore_patterns('.*', '__pycache__', 'build', 'dist', '*.egg-info', '*.safetensors')
    return shutil.copytree(ROOT, target, ignore=skipped)


@pytest.fixture(scope='session')
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout."""
    return copy_checkout(tmp_path_factory.mktemp('checkout') / 'repo')


@pytest.fixture(scope='session')
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist of the copy, built as pip builds them."""
    target = tmp_path_factory.mktemp('dist')
    for build in ('build_sdist', 'build_wheel'):
        code = f'from setuptools import build_meta; build_meta.{build}({str(target)!r})'
        subprocess.run([sys.executable, '-c', code], cwd=source, check=True, capture_output=True, timeout=120)
    return {'wheel': next(target.glob('*.whl')), 'sdist': next(target.glob('*.tar.gz'))}


@pytest.fixture(scope='session')
def make_environment(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Callable[..., Environment]:
    """Call with an optional checkout to get a new environment without the package."""
    return lambda checkout=source: new_environment(tmp_path_factory.mktemp('env'), checkout)


@pytest.fixture(scope='session', params=KINDS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, source: Path,
              distributions: dict[str, Path]) -> Environment:
    """An environment with the package, once for each way to install it."""
    environment = new_environment(tmp_path_factory.mktemp(request.param), source, request.param)
    install(environment, *(['-e', source] if request.param == 'editable' else [distributions[request.param]]))
    return environment


@pytest.fixture(params=['root', 'elsewhere'])
def cwd(request: pytest.FixtureRequest, installed: Environment) -> Path:
    """Where Python is started: in the repository root, which `python -c` puts on its path, or outside of it."""
    return installed.source if request.param == 'root' else installed.elsewhere


@pytest.fixture
def openai_kernels(installed: Environment) -> Iterator[Path]:
    """A stand-in for OpenAI's `triton_kernels`, installed beside our package."""
    package = installed.site / 'triton_kernels'
    package.mkdir()
    (package / '__init__.py').write_text("WHO = 'openai'\n")
    (package / 'matmul_ogs.py').write_text('from . import WHO\nMATMUL = WHO\n')
    yield package
    shutil.rmtree(package)
