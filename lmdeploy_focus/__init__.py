"""FOCUS for block-diffusion language models, as an extension of stock LMDeploy.

Importing this package loads neither torch nor lmdeploy: its public names are fetched on first use (PEP 562). That keeps
the start-up hook, which every interpreter of the environment runs, out of everyone's way.
"""
TYPE_CHECKING = False  # type checkers read it as true; importing typing would cost every interpreter start
if TYPE_CHECKING:
    from .activation import activate
    from .config import FocusEngineConfig
    from .dflash.config import DFlashConfig
    from .request import FocusGenerationConfig
    from .stats import run_stats

__version__ = '0.1.0'

__all__ = ['DFlashConfig', 'FocusEngineConfig', 'FocusGenerationConfig', '__version__', 'activate', 'run_stats']

_MODULE_OF = {'DFlashConfig': 'dflash.config', 'FocusEngineConfig': 'config',
              'FocusGenerationConfig': 'request', 'activate': 'activation', 'run_stats': 'stats'}


def __getattr__(name: str) -> object:
    """Import a public name's module on first use.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from importlib import import_module
    value = getattr(import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
