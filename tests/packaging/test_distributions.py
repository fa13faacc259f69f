"""What is in the wheel, in the sdist and in an editable installation."""
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

FOLDERS = {'lmdeploy_focus': 'lmdeploy_focus', 'triton_kernels': 'lmdeploy_focus/kernels',
           'patches': 'lmdeploy_focus/patches'}


def modules(source: Path) -> set[str]:
    """The names in a wheel of all modules of the checkout."""
    return {f'{package}/{path.relative_to(source / folder).as_posix()}'
            for folder, package in FOLDERS.items() for path in (source / folder).rglob('*.py')}


@pytest.fixture(scope='module')
def wheel(distributions: dict[str, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(distributions['wheel'])


def test_wheel_holds_every_module_under_one_top_level_name(wheel: zipfile.ZipFile, source: Path) -> None:
    """Red when a folder loses its `__init__.py` or its mapping, or when tests/ or eval/ get installed."""
    names = {name for name in wheel.namelist() if '.dist-info/' not in name}
    assert names == modules(source) | {'lmdeploy_focus.pth'}


def test_start_up_line_is_recorded(wheel: zipfile.ZipFile) -> None:
    """Red when the `.pth` file is copied in behind pip's back: an uninstall would then leave it behind."""
    record = next(name for name in wheel.namelist() if name.endswith('.dist-info/RECORD'))
    assert any(line.startswith('lmdeploy_focus.pth,sha256=') for line in wheel.read(record).decode().splitlines())


def test_metadata(wheel: zipfile.ZipFile) -> None:
    """Red when the pin on LMDeploy, the oldest Python, the licence or the fallback command changes."""
    by_name = {name.partition('.dist-info/')[2]: name for name in wheel.namelist()}
    metadata = Parser().parsestr(wheel.read(by_name['METADATA']).decode())
    required = [line for line in metadata.get_all('Requires-Dist') if 'extra ==' not in line]
    assert set(next(line for line in required if line.startswith('lmdeploy'))[len('lmdeploy'):].split(',')) \
        == {'>=0.18', '<0.19'}
    assert metadata['Requires-Python'] == '>=3.10'
    assert metadata['License'] == 'Apache-2.0'
    assert any(name.endswith('LICENSE') for name in by_name)
    assert 'lmdeploy-focus = lmdeploy_focus.cli:main' in wheel.read(by_name['entry_points.txt']).decode()


def test_sdist_holds_what_a_build_needs(distributions: dict[str, Path], source: Path) -> None:
    """Red when a mapped folder, the licence or the build files stay out of the sdist."""
    with tarfile.open(distributions['sdist']) as sdist:
        names = {name.partition('/')[2] for name in sdist.getnames()}
    of_packages = {path.relative_to(source).as_posix()
                   for folder in FOLDERS for path in (source / folder).rglob('*.py')}
    assert names >= of_packages | {'setup.py', 'pyproject.toml', 'LICENSE'}


def test_install_is_removed_whole(make_environment: Callable, distributions: dict[str, Path]) -> None:
    """Red when an uninstall leaves the start-up line, or anything else, in site-packages."""
    environment = make_environment()
    before = sorted(environment.site.iterdir())
    environment.pip('install', '-q', '--no-deps', '--no-index', '--ignore-installed', distributions['wheel'])
    assert (environment.site / 'lmdeploy_focus.pth').exists()
    environment.pip('uninstall', '-q', '-y', 'lmdeploy-focus')
    assert sorted(environment.site.iterdir()) == before


def test_interpreter_starts_without_its_checkout(make_environment: Callable, source: Path, tmp_path: Path) -> None:
    """Red when the start-up line complains in every Python start after an editable checkout was deleted."""
    checkout = shutil.copytree(source, tmp_path / 'repo')
    environment = make_environment(checkout)
    environment.pip('install', '-q', '--no-deps', '--no-index', '--no-build-isolation', '--ignore-installed',
                    '-e', checkout)
    finders = 'import json, sys; print(json.dumps([type(f).__name__ for f in sys.meta_path]))'
    assert 'CliFinder' in environment.python(finders)
    shutil.rmtree(checkout)
    assert 'CliFinder' not in environment.python(finders)
