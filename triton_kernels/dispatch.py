"""Which implementation of the kernels runs: Triton on a GPU, the torch twins elsewhere."""
from importlib import import_module
from types import SimpleNamespace
from typing import Any

# Functions of a step, by the module that has them; the twin's module is `reference_` and the same name.
MODULES = {'enter': ('enter', ), 'importance': ('importance_partial', ), 'plan': ('plan', ), 'compact': ('compact', ),
           'norm_rope_fill': ('norm_rope_fill', ), 'context_fill': ('context_fill', ),
           'attention_work': ('attention_work', ), 'ragged_attention': ('ragged_attention', ),
           'greedy_head': ('greedy_head', ), 'sampled_head': ('sampled_head', ), 'settle': ('settle', )}
# twins that stand in `reference` itself
_SHARED = {'importance': 'reference'}


def kernels_for(device_type: str) -> Any:
    """The functions of MODULES for tensors on 'cuda' or 'cpu', as attributes."""
    functions: dict[str, Any] = {}
    for name, members in MODULES.items():
        module = name if device_type == 'cuda' else _SHARED.get(name, f'reference_{name}')
        source = import_module(f'{__package__}.{module}')
        functions |= {member: getattr(source, member) for member in members}
    return SimpleNamespace(**functions)
