"""Which implementation of the kernels runs: Triton on a GPU, the torch twins elsewhere."""
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = ('importance_partial', 'plan', 'ragged_attention', 'kv_fill', 'norm_rope_fill', 'greedy_head')


def kernels_for(device_type: str) -> Any:
    """The functions of NAMES for tensors on 'cuda' or 'cpu', as attributes."""
    modules = _triton() if device_type == 'cuda' else _twins()
    return SimpleNamespace(**{name: getattr(module, name) for name, module in modules.items()})


def _triton() -> dict[str, ModuleType]:
    from . import greedy_head, importance, kv_fill, norm_rope_fill, plan, ragged_attention
    return dict(zip(NAMES, (importance, plan, ragged_attention, kv_fill, norm_rope_fill, greedy_head), strict=True))


def _twins() -> dict[str, ModuleType]:
    from . import (
        reference,
        reference_greedy_head,
        reference_kv_fill,
        reference_norm_rope_fill,
        reference_plan,
        reference_ragged_attention,
    )
    return dict(zip(NAMES, (reference, reference_plan, reference_ragged_attention, reference_kv_fill,
                            reference_norm_rope_fill, reference_greedy_head), strict=True))
