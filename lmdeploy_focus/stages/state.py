"""FocusState: what a sequence remembers from one denoising step of a block to the next."""
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """[S, L] bool with L <= 64 -> [S] int64, bit i is position i."""
    shifts = torch.arange(flags.size(1), device=flags.device)
    return (flags.long() << shifts).sum(1)


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """[S] int64 -> [S, length] bool, the inverse of :func:`pack_bits`."""
    shifts = torch.arange(length, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).bool()


@dataclass
class FocusState:
    """One row a running sequence, all tensors on the device; token ids and masks are LMDeploy's own step inputs.

    LMDeploy sends step t+1 before it has seen step t, so this state never visits the host: it is merged after prefill,
    reindexed with the batch and advanced by the step itself.

    Attributes:
        uncached: [S] int64, bit i is set while position i of the block still enters the step (delayed cache).
        progress: [S] int64, rightmost block position that has been through all layers in this block, -1 if none.
        decoded: [S] int64, tokens decoded by the decode steps of this block.
        steps: [S] int64, decode steps of this block that decoded at least one token.
    """
    uncached: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor

    @classmethod
    def fresh(cls, progress: Tensor) -> 'FocusState':
        """The state at the start of a block; `progress` [S] is L-1 after a dense denoising in prefill, else -1."""
        zeros = torch.zeros_like(progress, dtype=torch.int64)
        return cls(uncached=zeros - 1, progress=progress.long(), decoded=zeros, steps=zeros.clone())

    def merge(self, other: 'FocusState') -> 'FocusState':
        """Append the rows of `other`."""
        return self._map(lambda name, value: torch.cat([value, getattr(other, name)]))

    def reindex(self, indices: Tensor) -> 'FocusState':
        """Keep the rows `indices` [S'], in that order."""
        return self._map(lambda name, value: value[indices])

    def restart(self, finished: Tensor) -> 'FocusState':
        """Rows where `finished` [S] is set begin a new block."""
        start = FocusState.fresh(torch.full_like(self.progress, -1))
        return self._map(lambda name, value: torch.where(finished, getattr(start, name), value))

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> 'FocusState':
        return FocusState(**{f.name: function(f.name, getattr(self, f.name)) for f in fields(self)})
