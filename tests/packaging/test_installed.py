"""The installed package in use: from a wheel, an sdist and a checkout, started in the repository root and elsewhere."""
from pathlib import Path

import pytest

START = 'import json, sys\n'


def test_mapped_packages(installed, cwd: Path) -> None:
    """Red when `triton_kernels/` or `patches/` cannot be imported as part of the package, or not all of them."""
    stems = {name: sorted(path.stem for path in (installed.source / folder).glob('*.py'))
             for name, folder in {'kernels': 'triton_kernels', 'patches': 'patches'}.items()}
    files = installed.python(START + f"""
from importlib import import_module
from importlib.util import find_spec
files = {{}}
for name, stems in {stems!r}.items():
    package = import_module('lmdeploy_focus.' + name)
    files[name] = [package.__file__, *(find_spec(package.__name__ + '.' + s).origin for s in stems if s != '__init__')]
print(json.dumps(files))""", cwd=cwd)
    for name, folder in {'kernels': 'triton_kernels', 'patches': 'patches'}.items():
        expected = installed.source / folder if installed.kind == 'editable' else installed.package / name
        assert {Path(file).parent for file in files[name]} == {expected}
        assert sorted(Path(file).stem for file in files[name]) == stems[name]


def test_openai_package_keeps_its_name(installed, cwd: Path, openai_kernels: Path) -> None:
    """Red when our folder hides OpenAI's `triton_kernels`, or OpenAI's hides our kernels."""
    seen = installed.python(START + """
import triton_kernels
from triton_kernels import matmul_ogs
import lmdeploy_focus.kernels as ours
print(json.dumps([triton_kernels.__file__, matmul_ogs.__file__, matmul_ogs.MATMUL, triton_kernels is ours,
                  sys.modules['triton_kernels'] is triton_kernels]))""", cwd=cwd)
    assert seen == [str(openai_kernels / '__init__.py'), str(openai_kernels / 'matmul_ogs.py'), 'openai', False, True]


def test_openai_package_is_missed_honestly(installed, cwd: Path) -> None:
    """Red when `import triton_kernels` in the repository root finds our folder, or leaves half a module behind."""
    seen = installed.python(START + """
try:
    from triton_kernels import matmul_ogs
except ModuleNotFoundError as error:
    print(json.dumps([error.name, [name for name in sys.modules if name.startswith('triton_kernels')]]))
""", cwd=cwd)
    assert seen == ['triton_kernels', []]


def test_failing_openai_package_is_not_swallowed(installed, cwd: Path, openai_kernels: Path) -> None:
    """Red when an error inside OpenAI's package is reported as its absence, or leaves half a module behind."""
    (openai_kernels / '__init__.py').write_text("raise OSError('no driver')\n")
    seen = installed.python(START + """
try:
    import triton_kernels
except OSError as error:
    print(json.dumps([str(error), 'triton_kernels' in sys.modules]))""", cwd=cwd)
    assert seen == ['no driver', False]


def test_import_is_light(installed, cwd: Path) -> None:
    """Red when importing the package loads torch, lmdeploy or the engine side of our own code."""
    loaded = installed.python(START + 'import lmdeploy_focus\nprint(json.dumps(sorted(sys.modules)))', cwd=cwd)
    assert {name for name in loaded if name.startswith('lmdeploy')} == {'lmdeploy_focus', 'lmdeploy_focus.startup_hook'}
    assert not {'torch', 'triton', 'pydantic', 'transformers'} & set(loaded)


def test_public_names_are_lazy_and_known(installed) -> None:
    """Red when a public name is not listed by dir(), or an unknown one does not raise AttributeError."""
    listed, unknown = installed.python(START + """
import lmdeploy_focus
print(json.dumps([sorted(set(lmdeploy_focus.__all__) - set(dir(lmdeploy_focus))), hasattr(lmdeploy_focus, 'nothing')]))
""")
    assert (listed, unknown) == ([], False)


def test_start_up_line_imports_nothing_else(installed) -> None:
    """Red when the `.pth` line, run in every interpreter, loads a module beyond the two that it needs.

    Without `site`, the interpreter has nothing but what Python itself needs; `os` is there in every real start.
    """
    code = (f"import os, sys\nsys.path.insert(0, {str(installed.package.parent)!r})\nbefore = set(sys.modules)\n"
            f"line = open({str(installed.site / 'lmdeploy_focus.pth')!r}).read()\nassert line.count('\\n') == 1\n"
            "exec(line)\nprint(' '.join(sorted(set(sys.modules) - before)))")
    done = installed.command('-S', '-c', code)
    assert (done.stdout.split(), done.stderr) == (['lmdeploy_focus', 'lmdeploy_focus.startup_hook'], '')


@pytest.mark.parametrize('value, armed', [('1', False), ('0', True), ('', True)])
def test_disabled_by_the_environment(installed, value: str, armed: bool) -> None:
    """Red when LMDEPLOY_FOCUS_DISABLE=1 does not keep the hook out, or another value does."""
    code = START + 'print(json.dumps([type(f).__name__ for f in sys.meta_path].count("CliFinder")))'
    assert installed.python(code, LMDEPLOY_FOCUS_DISABLE=value) == armed


def test_version_is_the_installed_one(installed) -> None:
    """Red when the version is kept in a second place that differs."""
    code = 'import lmdeploy_focus; from importlib.metadata import version'
    ours, of_metadata = installed.python(
        START + code + '\nprint(json.dumps([lmdeploy_focus.__version__, version("lmdeploy-focus")]))')
    assert ours == of_metadata
