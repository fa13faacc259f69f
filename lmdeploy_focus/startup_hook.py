"""Teaches the stock `lmdeploy` command our options, when it is run and only then.

A `.pth` file calls `arm()` in every interpreter of the environment. It costs one finder on `sys.meta_path`, which waits
for LMDeploy's command line to be imported. `LMDEPLOY_FOCUS_DISABLE=1` in the environment keeps it from being set up.
"""
import os
import sys

TYPE_CHECKING = False  # type checkers read it as true; importing typing would cost every interpreter start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TARGET = 'lmdeploy.cli.entrypoint'
DISABLE = 'LMDEPLOY_FOCUS_DISABLE'


class CliFinder:
    """Meta-path finder that lets `lmdeploy_focus.cli.install()` follow the import of LMDeploy's command line."""

    def __init__(self) -> None:
        self._asking_others = False

    def find_spec(self, name: str, path: 'Sequence[str] | None' = None,
                  target: 'ModuleType | None' = None) -> 'ModuleSpec | None':
        """Leave every import but `TARGET`'s to the other finders; find that one through them."""
        if name != TARGET or self._asking_others:
            return None
        from importlib.util import find_spec
        self._asking_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            _follow_by_install(spec)
        return spec


def arm() -> None:
    """Wait for LMDeploy's command line; called by the `.pth` file, harmless when called again."""
    if os.environ.get(DISABLE) == '1' or any(isinstance(finder, CliFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, CliFinder())


def _follow_by_install(spec: 'ModuleSpec') -> None:
    loader = spec.loader
    run_module = loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: 'ModuleType') -> None:
        run_module(module)
        _install()

    loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]


def _install() -> None:
    try:
        from lmdeploy_focus.cli import install
        install()
    except Exception as error:  # whatever is wrong with the extension, the stock command must still run
        print(f'lmdeploy-focus: its options are not available: {type(error).__name__}: {error} '
              f'({DISABLE}=1 silences this)', file=sys.stderr)
