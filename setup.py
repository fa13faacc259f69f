"""Packaging of lmdeploy-focus.

Two things here are unusual. `triton_kernels/` and `patches/` lie at the top of the repository and are installed
as `lmdeploy_focus.kernels` and `lmdeploy_focus.patches`. And one line of start-up code goes to the root of
site-packages as a `.pth` file, from a wheel and from an editable install alike, so that the stock `lmdeploy` command
learns our options.
"""
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
PACKAGE_DIR = {'lmdeploy_focus.kernels': 'triton_kernels', 'lmdeploy_focus.patches': 'patches'}

# Sorts after setuptools' `__editable__*.pth`, so that an editable install can already be imported when it runs.
PTH_NAME = 'lmdeploy_focus.pth'
# ImportError is passed over because an interpreter outlives a checkout that was moved or deleted.
PTH_LINE = (r"import sys; exec('try:\n from lmdeploy_focus.startup_hook import arm\n arm()"
            r"\nexcept ImportError:\n pass')" '\n')


def write_pth(folder):
    """Write the start-up line to `folder`, the root of what becomes site-packages."""
    Path(folder, PTH_NAME).write_text(PTH_LINE)


class BuildPy(build_py):
    """Adds the `.pth` file to a wheel."""

    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib).mkdir(parents=True, exist_ok=True)
            write_pth(self.build_lib)

    def get_outputs(self, include_bytecode=True):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(Path(self.build_lib, PTH_NAME))]


class EditableWheel(editable_wheel):
    """Adds the `.pth` file to the wheel of an editable install, whose sources are not copied."""

    wrote_pth = False

    def run(self):
        super().run()
        if not self.wrote_pth:
            raise RuntimeError(f'this setuptools builds editable wheels in a way that leaves {PTH_NAME} out')

    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        # All that lies in `unpacked_wheel` goes into the wheel and its RECORD; setuptools has no public hook for that.
        built = super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)
        write_pth(unpacked_wheel)
        self.wrote_pth = True
        return built


def version():
    """The version, kept in `lmdeploy_focus/__init__.py` alone."""
    return re.search(r"^__version__ = '([^']+)'", (ROOT / 'lmdeploy_focus/__init__.py').read_text(), re.M)[1]


def long_description():
    readme = ROOT / 'README.md'
    return readme.read_text(encoding='utf-8') if readme.exists() else ''


setup(
    name='lmdeploy-focus',
    version=version(),
    description='FOCUS for block-diffusion language models, as an extension of stock LMDeploy',
    long_description=long_description(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    classifiers=[
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['lmdeploy_focus', 'lmdeploy_focus.*']) + list(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    python_requires='>=3.10',
    # numpy, torch, triton and transformers come with LMDeploy, in the versions that it accepts.
    install_requires=['lmdeploy>=0.18,<0.19', 'prometheus-client', 'pydantic>=2'],
    extras_require={
        # rich is for scripts/; setuptools is here because the packaging tests build without isolation.
        'test': ['hypothesis', 'ipykernel', 'mypy', 'nbclient', 'nbformat', 'pytest>=8', 'pytest-xdist', 'rich',
                 'ruff', 'setuptools>=70.1'],
    },
    entry_points={'console_scripts': ['lmdeploy-focus = lmdeploy_focus.cli:main']},
    cmdclass={'build_py': BuildPy, 'editable_wheel': EditableWheel},
)
