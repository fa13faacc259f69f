"""A paged KV cache with known content: every slot that belongs to no sequence holds NaN."""
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Paged:
    """A cache and the same keys and values as one list a sequence.

    Attributes:
        key_cache, value_cache: [B, G, Hkv, D].
        page_table: [S, P], pages in shuffled order; columns that a sequence does not need name page 0, as in LMDeploy.
        keys, values: of each sequence, [kv_len, Hkv, D].
    """
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_paged(lengths: list[int], page_size: int, heads: int, size: int, dtype: torch.dtype, seed: int,
               poison: float = float('nan')) -> Paged:
    """Sequences of the given number of keys, on pages of their own; all other slots hold `poison`."""
    random = torch.Generator().manual_seed(seed)
    columns = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(columns) + 3, generator=random)
    shape = (len(pages), page_size, heads, size)
    paged = Paged(torch.full(shape, poison, dtype=dtype), torch.full(shape, poison, dtype=dtype),
                  torch.zeros(len(lengths), max(columns), dtype=torch.int64), [], [])
    taken = 0
    for s, (length, width) in enumerate(zip(lengths, columns, strict=True)):
        own = pages[taken:taken + width]
        paged.page_table[s, :width] = own
        taken += width
        paged.keys.append(torch.randn(length, heads, size, generator=random).to(dtype))
        paged.values.append(torch.randn(length, heads, size, generator=random).to(dtype))
        token = torch.arange(length)
        paged.key_cache[own[token // page_size], token % page_size] = paged.keys[-1]
        paged.value_cache[own[token // page_size], token % page_size] = paged.values[-1]
    return paged
