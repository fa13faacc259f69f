"""The drafter's network: LMDeploy's, with a projection of the context for all layers at once and checked weights.

Letters: T context tokens, L layers, H hidden size of the drafter, G key heads, D head size, n layers of the target.
"""
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.models.qwen3_dflash import DFlashDraftModel, _normalize_dflash_weight_name
from torch import Tensor

from ..kernels.dispatch import kernels_for
from .checkpoint import check_tensor, check_tensors
from .rows import stacked, write_slots


class FocusDFlashDraftModel(DFlashDraftModel):
    """DFlash's drafter (arXiv 2602.06036, section 3): a few decoder layers over a block, which see the keys and values
    of projected target features and then the block's own. Embedding and head are the target's.

    Attention is LMDeploy's operator with the `causal` and `sliding_window` of each layer: a device can run the drafter
    as soon as its operator has both.

    Raises:
        ValueError: from loading, if a tensor of the checkpoint is unknown, missing or of another shape.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._name = config.dflash_config['name']
        self._expected = {name: tuple(shape) for name, shape in config.dflash_config['tensors'].items()}
        self._found: dict[str, tuple[int, ...]] = {}
        # Built from the layers' own once they are loaded; weights [L * 2 * G * D, H].
        self.register_buffer('context_weight', None, persistent=False)
        self.register_buffer('context_bias', None, persistent=False)
        self.register_buffer('context_norm', None, persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of one file.

        Raises:
            ValueError: one is unknown or of another shape than the config says.
        """
        super().load_weights(self._checked(weights))

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for full_name, weight in weights:
            name = _normalize_dflash_weight_name(full_name)
            if name is not None:
                check_tensor(name, tuple(weight.shape), self._expected, self._name)
                self._found[name] = tuple(weight.shape)
                yield name, weight

    def process_weights_after_loading(self) -> None:
        """After the last file: stack the key and value projections of all layers.

        Raises:
            ValueError: a tensor has never come.
        """
        check_tensors(self._found, self._expected, self._name)
        projections = [layer.self_attn.qkv_proj for layer in self.layers]
        queries = projections[0].all_out_features[0]
        self.context_weight = torch.cat([projection.weight[queries:] for projection in projections])
        if projections[0].bias is not None:
            self.context_bias = torch.cat([projection.bias[queries:] for projection in projections])
        self.context_norm = torch.stack([layer.self_attn.k_norm.weight for layer in self.layers])

    def project_context(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The context of all layers by one product and without queries.

        Args:
            features: [T, n * target's hidden size], outputs of the target's chosen layers.

        Returns:
            The context [T, H]; of each layer its keys, neither normed nor rotated, and its values, [T, L * 2 * G * D].
        """
        context = self.project_target_hidden(features)
        return context, F.linear(context, self.context_weight, self.context_bias)

    def precompute_and_store_context_kv(self, target_hidden: Tensor, position_ids: Tensor, past_key_values: list[Any],
                                        attn_metadata: Any, max_q_seqlen: int | None = None) -> None:
        """Write the keys and values of context tokens into the drafter's pages, for every layer at once.

        Rows of rejected tokens are written as well: they lie behind what the next block sees as its context, and that
        block overwrites them.

        Args:
            target_hidden: [T, n * target's hidden size].
            position_ids: [T].
            past_key_values: of each layer keys and values, [pages, page size, G, D].
            attn_metadata: of the step, with its page table.
            max_q_seqlen: part of the interface.
        """
        del max_q_seqlen
        context, projected = self.project_context(target_hidden)
        cos, sin = self._rotary_pos_emb_for_context(context, position_ids)
        keys, values = (stacked([caches[half] for caches in past_key_values]) for half in range(2))
        pages, offsets = write_slots(attn_metadata, position_ids, keys.size(2))
        kernels_for(projected.device.type).context_fill(projected, self.context_norm, cos, sin, keys, values, pages,
                                                        offsets, self.config.rms_norm_eps)
