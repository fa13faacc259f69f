"""What SDAR, SDAR-MoE and LLaDA2 have in common: their layers, cut at the seam between prefix and suffix.

All three are of Qwen3's shape up to the MLP, and LMDeploy's modules carry the same names in each.
"""
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..stages.decoder import KVCache, Rotary

if TYPE_CHECKING:
    from lmdeploy.pytorch.models.sdar import SDARForCausalLM as _Model
else:
    _Model = object


class DecoderLayer:
    """A layer of LMDeploy's as the stages see it (:class:`lmdeploy_focus.stages.decoder.Layer`)."""

    def __init__(self, layer: Any, scale: float, eps: float) -> None:
        self.layer, self.scale, self.eps = layer, scale, eps

    def queries(self, hidden: Tensor, residual: Tensor | None, rotary: Rotary, cache: KVCache, pages: Tensor,
                offsets: Tensor, kernels: Any, return_key: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Norm and QKV projection; then one kernel: q/k-norm, RoPE and the KV's write."""
        layer, attention = self.layer, self.layer.self_attn
        if residual is None:
            residual = hidden
            hidden = layer.input_layernorm(hidden)
        else:
            hidden, residual = layer.input_layernorm(hidden, residual)
        query, key = kernels.norm_rope_fill(attention.qkv_proj(hidden)[0], attention.q_norm.weight,
                                            attention.k_norm.weight, *rotary, *cache, pages, offsets, self.eps,
                                            return_key)
        return query, key, residual

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection, norm and MLP or experts."""
        hidden = self.layer.self_attn.o_proj(attended.flatten(1)[None])
        hidden, residual = self.layer.post_attention_layernorm(hidden, residual)
        return self.layer.mlp(hidden), residual


class ModelDecoder:
    """A model of LMDeploy's as the stages see it (:class:`lmdeploy_focus.stages.decoder.Decoder`)."""

    def __init__(self, model: Any, head_dim: int, eps: float) -> None:
        self.model = model
        self.layers = [DecoderLayer(layer, head_dim**-0.5, eps) for layer in model.layers]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings."""
        return self.model.embed_tokens(input_ids)

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Rotary:
        """Rotary tables of the rows; narrower than a head where only a part of it is rotated."""
        cos, sin = self.model.rotary_emb(hidden, position_ids)
        return cos[0], sin[0]

    def norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The final norm."""
        return self.model.norm(hidden, residual)[0]


class SplitModel(_Model):
    """Mixin before a model class of LMDeploy's: a `decoder` for the decode step."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        head_dim = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
        self.decoder = ModelDecoder(self.model, head_dim, config.rms_norm_eps)
