"""What must hold for the Triton norm, RoPE and KV write, interpreted or compiled; run as a program it checks small
shapes."""
from typing import Any

import pytest
import torch
from lmdeploy_focus.kernels import reference_norm_rope_fill as reference
from lmdeploy_focus.kernels.norm_rope_fill import norm_rope_fill
from torch import Tensor

# rows, H, Hkv, D, rotary_dim, page size
SMALL = [(3, 4, 2, 64, 64, 16), (17, 6, 3, 32, 16, 32), (5, 32, 8, 128, 128, 64), (7, 16, 4, 128, 64, 16),
         (4, 5, 1, 64, 20, 16)]
LARGE = [(1, 32, 8, 128, 128, 64), (8192, 32, 8, 128, 128, 64), (1801, 32, 4, 128, 128, 64), (777, 16, 4, 128, 64, 64),
         (100, 16, 1, 128, 128, 16), (129, 12, 12, 64, 64, 32)]
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str, table_dtype: torch.dtype | None = None
         ) -> dict[str, Any]:
    """Rows of a wider buffer, tables of random angles, caches inside pools that hold NaN, distinct slots; every
    third row is cached nowhere."""
    rows, heads, kv_heads, size, rotary, page_size = shape
    random = torch.Generator().manual_seed(sum(shape))
    width = (heads + 2 * kv_heads) * size
    # a wide range of scales: eps matters for some rows, and not for others
    scales = 10.0**torch.randint(-4, 2, (rows, 1), generator=random)
    qkv = (torch.randn(rows, width + 16, generator=random) * scales).to(dtype)[:, :width]
    weights = (torch.rand(2, size, generator=random) + 0.5).to(dtype)
    angles = torch.rand(rows, rotary, generator=random) * 6.28
    tables = torch.stack([angles.cos(), angles.sin()]).to(table_dtype or dtype)
    pages = -(-rows // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=random)[:rows]
    page, offset = slots // page_size, slots % page_size
    page[::3] = -1
    key_pool = torch.full((pages, 3, page_size, kv_heads, size), float('nan'), dtype=dtype).to(device)
    value_pool = torch.full((pages, page_size, kv_heads + 1, size), float('nan'), dtype=dtype).to(device)
    arguments = {'qkv': qkv, 'query_weight': weights[0], 'key_weight': weights[1], 'cos': tables[0], 'sin': tables[1],
                 'pages': page, 'offsets': offset}
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    return arguments | {'key_cache': key_pool[:, 1], 'value_cache': value_pool[:, :, 1:], 'eps': 1e-6}


def close(result: Tensor, expected: Tensor) -> None:
    """Equal up to the order of one sum in float32, which moves the last bit of a few values; a rounding that is missing
    or in another place moves that of many."""
    assert result.dtype == expected.dtype and result.isnan().equal(expected.isnan())
    result, expected = result.nan_to_num(nan=0), expected.nan_to_num(nan=0)
    unit = EPSILON[result.dtype]
    torch.testing.assert_close(result, expected, rtol=4 * unit, atol=16 * unit)
    assert result.dtype == torch.float32 or (result != expected).float().mean() < 2e-3


def check_twin(shape: tuple[int, ...], dtype: torch.dtype, device: str, table_dtype: torch.dtype | None = None) -> None:
    """The values of the twin: queries, keys, and every slot of the pools, those that nothing is written to included."""
    ours, twins = (make(shape, dtype, device, table_dtype) for _ in range(2))
    query, key = norm_rope_fill(**ours, return_key=True)
    expected_query, expected_key = reference.norm_rope_fill(**twins, return_key=True)
    assert query.is_contiguous() and key.is_contiguous()
    close(query, expected_query)
    close(key, expected_key)
    for name in ('key_cache', 'value_cache'):
        close(ours[name]._base, twins[name]._base)
    again = make(shape, dtype, device, table_dtype)
    same, nothing = norm_rope_fill(**again)
    assert nothing is None and same.equal(query)
    torch.testing.assert_close(again['key_cache']._base, ours['key_cache']._base, rtol=0, atol=0, equal_nan=True)
    none = {name: again[name][:0] for name in ('qkv', 'cos', 'sin', 'pages', 'offsets')}
    assert norm_rope_fill(**again | none)[0].shape == (0, *query.shape[1:])


def check_refusals(device: str) -> None:
    """Arguments that the kernel cannot take raise."""
    good = make((4, 4, 2, 32, 32, 16), torch.float32, device)
    cos, sin = good['cos'], good['sin']
    refused = [{'qkv': good['qkv'].half()}, {'qkv': good['qkv'][:, :-1]}, {'qkv': good['qkv'][:, :4 * 32]},
               {'qkv': good['qkv'].mT.contiguous().mT}, {'query_weight': good['query_weight'][1:]},
               {'key_weight': good['key_weight'].half()}, {'cos': cos[1:], 'sin': sin[1:]}, {'sin': sin[:, :16]},
               {'cos': cos[:, :15], 'sin': sin[:, :15]}, {'cos': cos[:, :0], 'sin': sin[:, :0]},
               {'cos': cos.repeat(1, 2), 'sin': sin.repeat(1, 2)}, {'pages': good['pages'][1:]},
               {'value_cache': good['value_cache'][:-1]}]
    for changes in refused:
        with pytest.raises(ValueError, match='norm_rope_fill'):
            norm_rope_fill(**good | changes)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, torch.float32, 'cpu')
        # the interpreter rounds to bfloat16 the wrong way
        check_twin(shape, torch.float16, 'cpu')
    check_twin(SMALL[0], torch.float16, 'cpu', torch.float32)
    check_refusals('cpu')


if __name__ == '__main__':
    main()
