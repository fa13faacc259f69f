"""What must hold for the Triton write of a drafter's context, interpreted or compiled; run as a program it checks small
shapes."""
from typing import Any

import pytest
import torch
from lmdeploy_focus.kernels import reference_context_fill as reference
from lmdeploy_focus.kernels.context_fill import context_fill

from .norm_rope_fill_checks import close

# rows, L, Hkv, D, rotary_dim, page size
SMALL = [(3, 2, 2, 64, 64, 16), (17, 5, 3, 32, 16, 32), (1, 1, 8, 128, 128, 64), (7, 3, 1, 64, 20, 16)]
LARGE = [(16, 5, 8, 128, 128, 64), (4096, 5, 8, 128, 128, 64), (777, 6, 4, 128, 64, 16), (129, 8, 12, 64, 64, 32)]


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Rows of a wider buffer, float32 tables, caches inside pools that hold NaN, distinct slots; every third row is
    cached nowhere."""
    rows, layers, kv_heads, size, rotary, page_size = shape
    random = torch.Generator().manual_seed(sum(shape))
    width = layers * 2 * kv_heads * size
    projected = torch.randn(rows, width + 16, generator=random).to(dtype)[:, :width]
    weight = (torch.rand(layers, size, generator=random) + 0.5).to(dtype)
    angles = torch.rand(rows, rotary, generator=random) * 6.28
    pages = -(-rows // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=random)[:rows]
    page, offset = slots // page_size, (slots % page_size).int()
    page[::3] = -1
    key_pool = torch.full((layers, pages, 3, page_size, kv_heads, size), float('nan'), dtype=dtype).to(device)
    value_pool = torch.full((layers + 1, pages, page_size, kv_heads + 1, size), float('nan'), dtype=dtype).to(device)
    arguments = {'projected': projected, 'key_weight': weight, 'cos': angles.cos(), 'sin': angles.sin(),
                 'pages': page, 'offsets': offset}
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    return arguments | {'key_cache': key_pool[:, :, 1], 'value_cache': value_pool[1:, :, :, 1:], 'eps': 1e-6}


def check_twin(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The values of the twin in every slot of the pools, those that nothing is written to included."""
    ours, twins = (make(shape, dtype, device) for _ in range(2))
    context_fill(**ours)
    reference.context_fill(**twins)
    assert (~twins['key_cache'].isnan()).sum() == (ours['pages'] >= 0).sum() * twins['key_cache'][:, 0, 0].numel()
    for name in ('key_cache', 'value_cache'):
        close(ours[name]._base, twins[name]._base)
    none = {name: ours[name][:0] for name in ('projected', 'cos', 'sin', 'pages', 'offsets')}
    context_fill(**ours | none)


def check_refusals(device: str) -> None:
    """Arguments that the kernel cannot take raise."""
    good = make((4, 2, 2, 32, 32, 16), torch.float32, device)
    cos, sin = good['cos'], good['sin']
    refused = [{'projected': good['projected'].half()}, {'projected': good['projected'][:, :-1]},
               {'projected': good['projected'].mT.contiguous().mT}, {'key_weight': good['key_weight'][1:]},
               {'key_weight': good['key_weight'].half()}, {'cos': cos[1:], 'sin': sin[1:]}, {'sin': sin[:, :16]},
               {'cos': cos[:, :15], 'sin': sin[:, :15]}, {'cos': cos.repeat(1, 2), 'sin': sin.repeat(1, 2)},
               {'pages': good['pages'][1:]}, {'offsets': good['offsets'].float()},
               {'value_cache': good['value_cache'][:, :-1]}, {'key_cache': good['key_cache'].half()}]
    for changes in refused:
        with pytest.raises(ValueError, match='context_fill'):
            context_fill(**good | changes)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, torch.float32, 'cpu')
        # the interpreter rounds to bfloat16 the wrong way
        check_twin(shape, torch.float16, 'cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
