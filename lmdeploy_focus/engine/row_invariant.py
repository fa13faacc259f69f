"""Row-invariant arithmetic (option focus_deterministic): company never changes the bits of a row.

A matrix product picks its kernel, and with it the order of its sums, by the number of rows. Here every linear layer
runs its rows in chunks of one size: the kernel is always the same, and a row's sum does not depend on where in a chunk
it lies. Norms, activations, RoPE and the greedy head work row by row already. Attention does not split its keys
(:data:`SPLITS`): where a split ends depends on the longest row of its tile, which is another one in a prefill than in
the step that commits the same block.
"""
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Wide enough that a step of many sequences is not ruled by reading weights again for each chunk, narrow enough that one
# of few is.
CHUNK = 256
SPLITS = 1


def make_row_invariant(model: nn.Module) -> None:
    """Run every linear layer of `model`, the head included, in chunks of CHUNK rows."""
    from lmdeploy.pytorch.nn.linear.base import LinearBase
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.forward = types.MethodType(_in_chunks(type(module).forward), module)


def _in_chunks(original: Any) -> Any:

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        shape = x.shape
        rows = x.reshape(-1, shape[-1])
        count = rows.size(0)
        rows = F.pad(rows, (0, 0, 0, -count % CHUNK))
        out = [original(self, rows[start:start + CHUNK]) for start in range(0, rows.size(0), CHUNK)]
        return torch.cat(out)[:count].view(*shape[:-1], -1)

    return forward
