"""Target models that hand out the hidden states of some layers beside their last ones.

LMDeploy's Qwen3 does so itself when it is built in a speculative context; the others get it here. Context features are
the residual stream after a decoder layer, `hidden_states[id + 1]` of transformers, as in the DFlash code (arXiv
2602.06036, section 3).
"""
import copy
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.model_inputs import SpecModelBuildContext
from torch import Tensor, nn

# Architecture of config.json -> the one whose class is built. Names of our own, so that registering them changes
# nothing for an engine without DFlash.
TARGETS = {'Qwen3ForCausalLM': 'Qwen3ForCausalLM', 'Qwen3MoeForCausalLM': 'DFlashQwen3MoeForCausalLM',
           'Qwen2ForCausalLM': 'DFlashQwen2ForCausalLM', 'LlamaForCausalLM': 'DFlashLlamaForCausalLM'}
_CLASSES = {'DFlashQwen3MoeForCausalLM': 'lmdeploy_focus.dflash.target_models.DFlashQwen3MoeForCausalLM',
            'DFlashQwen2ForCausalLM': 'lmdeploy_focus.dflash.target_models.DFlashQwen2ForCausalLM',
            'DFlashLlamaForCausalLM': 'lmdeploy_focus.dflash.target_models.DFlashLlamaForCausalLM',
            'FocusDFlashDraftModel': 'lmdeploy_focus.dflash.network.FocusDFlashDraftModel'}


@dataclass(frozen=True)
class DFlashBuildContext(SpecModelBuildContext):
    """LMDeploy's speculative metadata for model construction, of an engine with `DFlashConfig`."""


def register() -> None:
    """Put our classes into LMDeploy's register of models; may be called again."""
    from lmdeploy.pytorch.models.module_map import CUSTOM_MODULE_MAP
    CUSTOM_MODULE_MAP.update(_CLASSES)


def target_hf_config(hf_config: Any) -> Any:
    """A copy of a target's HF config that names the class which hands out hidden states.

    Raises:
        ValueError: there is none for its architecture.
    """
    architecture = (hf_config.architectures or [None])[0]
    if architecture not in TARGETS:
        raise ValueError(f'the architecture of the target is {architecture!r}; it must be {" or ".join(TARGETS)}')
    changed = copy.deepcopy(hf_config)
    changed.architectures, changed.auto_map = [TARGETS[architecture]], {}
    return changed


class HiddenStates:
    """Mixin before a causal model of LMDeploy's whose `model.layers` return (hidden states, residual).

    Its forward then returns {'hidden_states': [1, T, H], 'aux_hidden_states': [1, T, n * H]}, the second with the
    output of the n layers of the speculative context, in ascending order. Without one the model stays what it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from lmdeploy.pytorch.models.patch import get_build_model_context
        self._features: list[Tensor] = []
        self._chosen = get_build_model_context().spec_model_ctx.target_aux_hidden_state_layers
        for layer in self._chosen:
            self.model.layers[layer].register_forward_hook(self._keep)  # type: ignore[attr-defined]

    def _keep(self, layer: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        del layer, inputs
        hidden_states, residual = outputs[:2]
        # A new tensor: the next norm may overwrite the residual.
        self._features.append(hidden_states + residual)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base class's forward, with the hidden states of the chosen layers."""
        self._features.clear()
        outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self._chosen:
            return outputs
        named = outputs if isinstance(outputs, dict) else {'hidden_states': outputs}
        features = torch.cat(self._features, dim=-1)
        self._features.clear()
        return {**named, 'aux_hidden_states': features}

    def get_outputs_cudagraph(self, output_buffers: dict[str, Tensor], input_ids: Tensor,
                              **kwargs: Any) -> dict[str, Tensor]:
        """The outputs of a graph for the T rows of `input_ids` [1, T], those of the chosen layers included."""
        outputs = super().get_outputs_cudagraph(output_buffers, input_ids, **kwargs)  # type: ignore[misc]
        features = output_buffers.get('aux_hidden_states')
        return outputs if features is None else {**outputs, 'aux_hidden_states': features[:, :input_ids.size(-1)]}
