"""Makes the running process one in which LMDeploy has FOCUS: registers our parts, then applies the patches.

Everything here may be called again at any time: the config objects call it wherever they are built or unpickled, which
brings the extension into every process that LMDeploy spawns.
"""
from .patches import apply, check_version, rows


def activate() -> None:
    """Register our parts and patch the engine.

    A patched function does what LMDeploy's own does unless the config it works for is one of ours.

    Raises:
        PatchError: the installed LMDeploy is outside the pin, or a patch's target has moved.
    """
    register()
    apply(rows('engine'))


def activate_cpu() -> None:
    """The same, and make `device_type='cpu'` a device of LMDeploy's.

    Raises:
        PatchError: see `activate`.
    """
    register()
    apply(rows('engine') + rows('cpu'))


def register() -> None:
    """Register our HF configs, config builder and models in LMDeploy's and transformers' own registries.

    This patches nothing, and it is all that happens with focus off on a GPU.

    Raises:
        PatchError: the installed LMDeploy is outside the pin.
    """
    check_version()
    from .dflash import targets
    from .models import configs
    configs.register()
    targets.register()
