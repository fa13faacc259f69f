"""LMDeploy's classes of the targets that do not hand out hidden states by themselves."""
from lmdeploy.pytorch.models.llama import LlamaForCausalLM
from lmdeploy.pytorch.models.qwen2 import Qwen2ForCausalLM
from lmdeploy.pytorch.models.qwen3_moe import Qwen3MoeForCausalLM

from .targets import HiddenStates


class DFlashLlamaForCausalLM(HiddenStates, LlamaForCausalLM):
    """Llama 3.x."""


class DFlashQwen2ForCausalLM(HiddenStates, Qwen2ForCausalLM):
    """Qwen2.5."""


class DFlashQwen3MoeForCausalLM(HiddenStates, Qwen3MoeForCausalLM):
    """Qwen3-MoE."""
