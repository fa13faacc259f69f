"""Triton kernels of FOCUS, each with a twin in plain torch; installed as `lmdeploy_focus.kernels`.

OpenAI publishes a package named `triton_kernels`. An interpreter that has this repository's root on its path would find
this folder in its place, so under that name this file steps aside and the next package of the name is loaded.
"""


def _step_aside() -> None:
    """Load the `triton_kernels` that comes next on the path into `sys.modules`.

    Raises:
        ModuleNotFoundError: there is none.
    """
    import os
    import sys
    from importlib.util import module_from_spec

    here = os.path.realpath(__file__)
    root = os.path.dirname(os.path.dirname(here))
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry) != root]
    for finder in sys.meta_path:
        spec = finder.find_spec(__name__, elsewhere)
        if spec is not None and spec.loader is not None and os.path.realpath(spec.origin or '') != here:
            module = module_from_spec(spec)
            sys.modules[__name__] = module
            spec.loader.exec_module(module)
            return
    raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)


if __name__ == 'triton_kernels':
    _step_aside()
