"""The blocks of a training step: where they begin, what they hold, what they see, what they count (arXiv 2602.06036).

Letters: S sequences, T tokens of a sequence, A anchors of a sequence, Q block size, its anchor included.
"""
from dataclasses import dataclass

import torch
from torch import Tensor


def gamma(block_size: int) -> float:
    """How slowly the weight of a block's later tokens falls: 4, 5 and 7 for blocks of 8, 10 and 16, as in the DFlash
    authors' recipe, and on the straight lines through these elsewhere."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def decay(block_size: int, device: torch.device | str = 'cpu') -> Tensor:
    """Weights exp(-(k - 1) / gamma) of the drafted slots k = 1 ... Q - 1, fp32 [Q - 1]: a token is of use only if all
    before it were accepted."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma(block_size))


def draw_anchors(answer: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Random anchors: answer tokens that an answer token follows.

    Args:
        answer: bool [S, T], tokens that have a loss.
        count: anchors of a sequence, at most T.
        generator: of the draw, on any device; None is the default one of `answer`'s device.

    Returns:
        int64 [S, count] positions without repetition, and bool [S, count], which of them are real; a sequence with
        fewer possible ones is filled up.
    """
    possible = torch.roll(answer, -1, 1) & answer
    possible[:, -1] = False
    device = answer.device if generator is None else generator.device
    # Above 0, so that a possible anchor never looks like an impossible one.
    drawn = 1 - torch.rand(answer.shape, generator=generator, device=device).to(answer.device)
    drawn = torch.where(possible, drawn, 0.0).topk(count, 1)
    return drawn.indices, drawn.values > 0


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch, each at its sequence's own positions.

    ids: int64 [S, A, Q], the anchor's token and then mask tokens.
    positions: int64 [S, A, Q].
    labels: int64 [S, A, Q - 1]; slot k has the token at its own position, there is no shift.
    counted: bool [S, A, Q - 1], slots whose label and all before it in the block belong to the answer.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    counted: Tensor


def cut_blocks(ids: Tensor, answer: Tensor, anchors: Tensor, real: Tensor, block_size: int, mask_token: int) -> Blocks:
    """Blocks after anchors.

    Args:
        ids: int64 [S, T]; answer: bool [S, T], see `draw_anchors`.
        anchors, real: [S, A], see there.
    """
    length = ids.shape[1]
    positions = anchors[..., None] + torch.arange(block_size, device=ids.device)
    inside = positions.clamp_max(length - 1).flatten(1)
    tokens = ids.gather(1, inside).view(positions.shape)
    counted = answer.gather(1, inside).view(positions.shape) & (positions < length)
    counted = counted[..., 1:].long().cumprod(-1).bool() & real[..., None]
    block = torch.full_like(tokens, mask_token)
    block[..., 0] = tokens[..., 0]
    return Blocks(block, positions, tokens[..., 1:], counted)


def visible(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """What the rows of all blocks see, of the context and then of the blocks: bool [S, 1, A * Q, T + A * Q].

    The context strictly before the own anchor, whose features are not known yet when it is drafted from, and the own
    block in both directions; never another block.
    """
    device = anchors.device
    before = torch.arange(length, device=device) < anchors.repeat_interleave(block_size, 1)[..., None]
    owner = torch.arange(anchors.shape[1], device=device).repeat_interleave(block_size)
    own = (owner[:, None] == owner[None]).expand(len(anchors), -1, -1)
    return torch.cat([before, own], -1)[:, None]
