"""A training term that makes a tiny model behave as large ones do by themselves (FOCUS, section 3).

It makes layer 1 attend to the tokens that the model is about to decode. Without it a model of this size marks them one
layer later, and with the opposite sign.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from ..network import Attention

_LOWEST = -1e30


def block_importance(attention: Attention, normed: Tensor, cos: Tensor, sin: Tensor, order: Tensor,
                     valid: Tensor) -> Tensor:
    """Attention that each masked token of a block receives from the block's masked tokens (equation 2).

    Args:
        attention: of the layer; normed: [R, T, C], the layer's normed input.
        order, valid: [R * T / L, L], the masked tokens of each block first, in position order; the others are invalid.

    Returns:
        fp32 [R * T / L, L] in that order, 0 where invalid.
    """
    blocks, length = order.shape
    shape = attention.shape
    query = attention.query(normed, cos, sin).float()
    key = attention.key_value(normed, cos, sin)[0].float()
    index = order[..., None, None]
    query = query.reshape(blocks, length, shape.heads, shape.head_size)
    query = query.gather(1, index.expand(-1, -1, shape.heads, shape.head_size))
    key = key.reshape(blocks, length, shape.kv_heads, shape.head_size)
    key = key.gather(1, index.expand(-1, -1, shape.kv_heads, shape.head_size))
    key = key.repeat_interleave(shape.heads // shape.kv_heads, 2)
    scores = torch.einsum('nihd,njhd->nhij', query, key) * shape.head_size ** -0.5
    scores = scores.masked_fill(~valid[:, None, None, :], _LOWEST)
    side = scores.new_full((*scores.shape[:-1], 1), _LOWEST)
    left, right = torch.cat([side, scores[..., :-1]], -1), torch.cat([scores[..., 1:], side], -1)
    pooled = torch.stack([left, scores, right]).amax(0).masked_fill(~valid[:, None, None, :], _LOWEST)
    return (pooled.softmax(-1) * valid[:, None, :, None]).sum((1, 2)) * valid


def decodability_loss(delta: Tensor, valid: Tensor, decodable: Tensor) -> Tensor:
    """How well the standardised importance delta of a block tells decodable masked tokens from others; all [N, L].

    Blocks in which all or none are decodable do not count.
    """
    count = valid.sum(1, keepdim=True).clamp_min(1)
    mean = (delta * valid).sum(1, keepdim=True) / count
    variance = ((delta - mean).square() * valid).sum(1, keepdim=True) / count
    standardised = (delta - mean) / (variance + 1e-3).sqrt()
    mixed = ((decodable & valid).any(1) & (~decodable & valid).any(1))[:, None]
    weight = valid * mixed
    loss = F.binary_cross_entropy_with_logits(2.0 * standardised, decodable.float(), reduction='none')
    return (loss * weight).sum() / weight.sum().clamp_min(1)
