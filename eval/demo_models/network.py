"""A decoder of Qwen3's shape and the DFlash drafter in plain torch, for training and for reference decoding.

Letters: S sequences, T tokens of a sequence, K keys, H heads, G key/value heads, D head size, C hidden size.
Parameters carry the names of the Hugging Face checkpoints without the `model.` prefix; the head is tied to the
embedding.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import VOCABULARY


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; the defaults are the demo models'."""

    vocabulary: int = VOCABULARY
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    intermediate: int = 768
    rope_theta: float = 10000.0
    epsilon: float = 1e-6


class Linear(nn.Module):
    """No bias; the weight stays in its own dtype and is cast to that of the input."""

    def __init__(self, inputs: int, outputs: int, deviation: float = 0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * deviation)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in fp32."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (y * self.weight.float()).to(x.dtype)


def rope_table(positions: int, head_size: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, each fp32 [positions, D]."""
    inverse = theta ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., T, H, D] by [..., T, D]."""
    first, second = x.float().chunk(2, -1)
    y = x.float() * cos.unsqueeze(-2) + torch.cat([-second, first], -1) * sin.unsqueeze(-2)
    return y.to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Grouped attention.

    Args:
        query: [S, T, H, D]; key and value: [S, K, G, D].
        mask: bool [S or 1, 1, T or 1, K], True where a key is seen; None with `causal`.

    Returns:
        [S, T, H, D].
    """
    sequences, tokens, heads, size = query.shape
    group = heads // key.shape[2]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if group > 1 and mask is not None and tokens <= 64:
        # A few queries: fold the group into the query axis instead of repeating all keys.
        query = query.view(sequences, tokens, heads // group, group, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(sequences, heads // group, group * tokens, size)
        if mask.shape[-2] != 1:
            mask = mask.repeat(1, 1, group, 1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        y = y.view(sequences, heads // group, group, tokens, size).permute(0, 3, 1, 2, 4)
        return y.reshape(sequences, tokens, heads, size)
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    y = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask, is_causal=causal)
    return y.transpose(1, 2)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, block_mask) -> Tensor:
    """The same through flex attention, whose block mask skips what no query sees."""
    from torch.nn.attention.flex_attention import flex_attention
    y = flex_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), block_mask=block_mask,
                       enable_gqa=True)
    return y.transpose(1, 2)


class Attention(nn.Module):
    """Projections of one layer; what a query sees is the caller's business."""

    def __init__(self, shape: Shape, output_deviation: float):
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_size)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_size)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_size)
        self.o_proj = Linear(shape.heads * shape.head_size, shape.hidden, output_deviation)
        self.q_norm = RMSNorm(shape.head_size, shape.epsilon)
        self.k_norm = RMSNorm(shape.head_size, shape.epsilon)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., T, C] -> [..., T, H, D], normed and rotated."""
        query = self.q_proj(x)
        query = query.view(*query.shape[:-1], self.shape.heads, self.shape.head_size)
        return rotate(self.q_norm(query), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., T, C] -> twice [..., T, G, D]; the key is normed and rotated."""
        key, value = self.k_proj(x), self.v_proj(x)
        key = key.view(*key.shape[:-1], self.shape.kv_heads, self.shape.head_size)
        return rotate(self.k_norm(key), cos, sin), value.view(key.shape)

    def output(self, y: Tensor) -> Tensor:
        """[..., T, H, D] -> [..., T, C]."""
        return self.o_proj(y.reshape(*y.shape[:-2], -1))


class MLP(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, shape: Shape, output_deviation: float):
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden, output_deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, output_deviation: float):
        super().__init__()
        self.self_attn = Attention(shape, output_deviation)
        self.mlp = MLP(shape, output_deviation)
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer after its attention: [S, T, C] and [S, T, H, D] -> [S, T, C]."""
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: str, mask=None) -> Tensor:
        """`attention` is 'causal', 'flex' (mask is a block mask) or 'dense' (mask is a bool tensor)."""
        normed = self.input_layernorm(x)
        query = self.self_attn.query(normed, cos, sin)
        key, value = self.self_attn.key_value(normed, cos, sin)
        if attention == 'flex':
            return self.finish(x, attend_flex(query, key, value, mask))
        return self.finish(x, attend(query, key, value, mask, causal=attention == 'causal'))


class Decoder(nn.Module):
    """The autoregressive target and, with other masks, the block diffusion model."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        deviation = 0.02 / (2 * shape.layers) ** 0.5
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList([Layer(shape, deviation) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.epsilon)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.norm.weight.dtype

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Token ids [...] -> [..., C]."""
        return F.embedding(ids, self.embed_tokens.weight).to(dtype)

    def trunk(self, ids: Tensor, cos: Tensor, sin: Tensor, attention: str, mask=None,
              dtype: torch.dtype = torch.bfloat16, collect: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """All layers: ids [S, T] -> normed hidden states [S, T, C] and the outputs of the layers in `collect`."""
        x = self.embed(ids, dtype)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attention, mask)
            if index in collect:
                features.append(x)
        return self.norm(x), features

    def logits(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., vocabulary]."""
        return F.linear(x, self.embed_tokens.weight.to(x.dtype))


class DraftLayer(Layer):
    """Queries are the noisy block; keys and values are the projected target features and the block."""

    def forward(self, x: Tensor, context: Tensor, block_rope: tuple[Tensor, Tensor],
                context_rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        query = self.self_attn.query(normed, *block_rope)
        key, value = self.self_attn.key_value(normed, *block_rope)
        context_key, context_value = self.self_attn.key_value(context, *context_rope)
        key, value = torch.cat([context_key, key], 1), torch.cat([context_value, value], 1)
        return self.finish(x, attend(query, key, value, mask))


class Draft(nn.Module):
    """DFlash's drafter (arXiv 2602.06036): no embedding and no head of its own."""

    def __init__(self, shape: Shape, target_layers: Sequence[int], block_length: int = 16):
        super().__init__()
        self.shape, self.target_layers, self.block_length = shape, tuple(target_layers), block_length
        deviation = 0.02 / (2 * shape.layers) ** 0.5
        self.layers = nn.ModuleList([DraftLayer(shape, deviation) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.epsilon)
        self.fc = Linear(len(self.target_layers) * shape.hidden, shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden, shape.epsilon)

    def context(self, features: list[Tensor]) -> Tensor:
        """Outputs of the target layers, each [S, T, C] -> [S, T, C]."""
        return self.hidden_norm(self.fc(torch.cat(features, -1)))

    def forward(self, x: Tensor, features: list[Tensor], block_rope: tuple[Tensor, Tensor],
                context_rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        context = self.context(features)
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, mask)
        return self.norm(x)
