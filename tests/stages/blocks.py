"""One denoising step of many blocks without a model: random kept sets, random tokens, the real delayed cache.

The machines of test_delayed_cache.py and test_state.py walk sequences through such steps.
"""
import numpy as np
import torch
from torch import Tensor

from lmdeploy_focus.stages.state import FocusState, unpack_bits
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED

from .. import oracle


def evict(entering: Tensor, mask: Tensor, progress: Tensor, random: np.random.Generator) -> Tensor:
    """A kept set [S, L] that selection could have made: all that is decoded, one masked position or more, and what lies
    between progress and the rightmost of them."""
    waiting = mask == MASKED
    place = torch.arange(mask.size(1))
    luck = torch.from_numpy(random.random(mask.shape)) * waiting
    right = torch.where(waiting.any(1), luck.argmax(1), -1)[:, None]
    chance = torch.from_numpy(random.random((mask.size(0), 1)))
    stays = (place == right) | ((place < right) & ((place > progress[:, None]) | (luck > chance)))
    return entering & (~waiting | stays)


def decode(mask: Tensor, kept: Tensor, random: np.random.Generator) -> Tensor:
    """The mask after a step that decides one or more of the kept masked positions; a complete block is CACHED."""
    waiting = (mask == MASKED) & kept
    luck = torch.from_numpy(random.random(mask.shape)) * waiting
    decided = waiting & ((luck > .6) | (luck == luck.amax(1, keepdim=True)))
    after = torch.where(decided, UNMASKED, mask)
    return torch.where((mask == UNMASKED).all(1, keepdim=True), CACHED, after).to(torch.uint8)


def assert_same(state: FocusState, blocks: list[oracle.Block], length: int) -> None:
    """The rows of `state` are the oracle's blocks."""
    uncached = unpack_bits(state.uncached, length)
    assert [flags.nonzero()[:, 0].tolist() for flags in uncached] == [block.uncached() for block in blocks]
    assert state.progress.tolist() == [block.progress for block in blocks]
    assert state.decoded.tolist() == [block.decoded for block in blocks]
    assert state.steps.tolist() == [block.steps for block in blocks]


def rightmost(flags: Tensor) -> Tensor:
    """[S] largest position that is set."""
    return (flags * torch.arange(flags.size(1))).amax(1)
