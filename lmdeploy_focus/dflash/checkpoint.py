"""The tensors that a drafter must have, and a look at a checkpoint's files before anything is loaded."""
import json
from collections.abc import Mapping
from pathlib import Path

from .drafter import Drafter

# A drafter may bring copies of the target's; the target's own are used.
SHARED = ('embed_tokens.weight', 'lm_head.weight')
MASK_EMBEDDING = 'mask_embedding.weight'
_INDEX, _SINGLE = 'model.safetensors.index.json', 'model.safetensors'

Shape = tuple[int, ...]


def tensor_shapes(drafter: Drafter, target_hidden: int, num_features: int) -> dict[str, Shape]:
    """Shapes of the drafter's tensors by name, without the prefix `model.`.

    Args:
        drafter: the drafter.
        target_hidden: hidden size of the target.
        num_features: layers of the target whose output is the context.
    """
    hidden, inner, dim = drafter.hidden_size, drafter.intermediate_size, drafter.head_dim
    rows = {'q': drafter.num_heads * dim, 'k': drafter.num_kv_heads * dim, 'v': drafter.num_kv_heads * dim, 'o': hidden}
    shapes: dict[str, Shape] = {'fc.weight': (hidden, num_features * target_hidden), 'hidden_norm.weight': (hidden, ),
                                'norm.weight': (hidden, )}
    for layer in range(len(drafter.layer_types)):
        prefix = f'layers.{layer}.'
        shapes |= {f'{prefix}{norm}.weight': (hidden, ) for norm in ('input_layernorm', 'post_attention_layernorm')}
        shapes |= {f'{prefix}self_attn.{norm}.weight': (dim, ) for norm in ('q_norm', 'k_norm')}
        for name, out in rows.items():
            shapes[f'{prefix}self_attn.{name}_proj.weight'] = (out, rows['q'] if name == 'o' else hidden)
            if drafter.attention_bias:
                shapes[f'{prefix}self_attn.{name}_proj.bias'] = (out, )
        shapes |= {f'{prefix}mlp.{name}_proj.weight': (inner, hidden) for name in ('gate', 'up')}
        shapes[f'{prefix}mlp.down_proj.weight'] = (hidden, inner)
    return shapes


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], name: str) -> None:
    """Compare the tensors of a drafter, both by name without the prefix `model.`.

    Raises:
        ValueError: one is unknown, missing or of another shape; the message names it.
    """
    for tensor, shape in found.items():
        check_tensor(tensor, shape, expected, name)
    missing = [tensor for tensor in expected if tensor not in found]
    if missing:
        more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
        raise ValueError(f'{name} lacks the tensor {", ".join(missing[:3])}{more}; by its config.json a DFlash drafter '
                         'must have it')


def check_tensor(tensor: str, shape: Shape, expected: Mapping[str, Shape], name: str) -> None:
    """Check one tensor.

    Raises:
        ValueError: it is unknown, or of another shape than the config says.
    """
    if tensor in SHARED:
        return
    if tensor == MASK_EMBEDDING:
        hidden = expected['norm.weight'][0]
        if shape not in ((hidden, ), (1, hidden)):
            raise ValueError(f'tensor {tensor} of {name} is {list(shape)}; it must be [{hidden}]')
    elif tensor not in expected:
        raise ValueError(f'tensor {tensor} {list(shape)} of {name} must not be there: a DFlash v1 drafter with its '
                         'config.json has none of that name')
    elif shape != expected[tensor]:
        raise ValueError(f'tensor {tensor} of {name} is {list(shape)}; by the config.json of drafter and target it '
                         f'must be {list(expected[tensor])}')


def read_shapes(folder: str) -> dict[str, Shape] | None:
    """Shapes of the tensors in a folder's safetensors files by normalised name, from the files' headers alone; None for
    a name that is not a folder yet, or a folder of another format, whose tensors are checked as they are loaded.

    Raises:
        ValueError: a file is missing, cut off or no safetensors file; the message names it.
    """
    from lmdeploy.pytorch.models.qwen3_dflash import _normalize_dflash_weight_name
    from safetensors import SafetensorError, safe_open
    path = Path(folder)
    if not path.is_dir() or any(path.glob('*.bin')):
        return None
    files = [path / _SINGLE]
    if (path / _INDEX).is_file():
        try:
            names = json.loads((path / _INDEX).read_text())['weight_map'].values()
            files = [path / name for name in sorted(set(names))]
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f'{path / _INDEX} is not an index of safetensors files: {error}') from error
    shapes: dict[str, Shape] = {}
    for file in files:
        try:
            with safe_open(file, 'pt') as opened:
                for tensor in list(opened.keys()):
                    name = _normalize_dflash_weight_name(tensor)
                    if name is not None:
                        shapes[name] = tuple(opened.get_slice(tensor).get_shape())
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{file} must be a whole safetensors file: {error}') from error
    return shapes
