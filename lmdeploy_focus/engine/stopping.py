"""Stopping: decode steps find their own stops, in position order; what is left is a prompt that may not be answered."""
from dataclasses import dataclass

import torch
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMStoppingCriteria
from torch import Tensor

from .step_inputs import FocusExtraInputs


@dataclass
class FocusStoppingCriteria(DLLMStoppingCriteria):
    """Stops of prefilled sequences.

    Attributes:
        num_appendable_ids: [S] int64, tokens that may still be appended, counted from the start of the block.
        output_start_pos: [S] int64, text position of the first generated token.
    """

    def clone(self) -> 'FocusStoppingCriteria':
        """The same criteria."""
        return FocusStoppingCriteria(self.num_appendable_ids, self.output_start_pos)

    def update(self, delta: ModelInputsDelta) -> 'FocusStoppingCriteria':
        """Keep the sequences of `delta`."""
        return FocusStoppingCriteria(self.num_appendable_ids[delta.indices], self.output_start_pos[delta.indices])

    def step(self, token_ids: Tensor, stop_words: Tensor | None, inputs: ModelInputs | None = None,
             extra_inputs: FocusExtraInputs | None = None) -> tuple[Tensor, Tensor, 'FocusStoppingCriteria']:
        """Which sequences end with their prefill, which decodes nothing: those without room for a token.

        Args:
            token_ids: [S * L] tokens of the prompts' last blocks.
            stop_words, inputs, extra_inputs: LMDeploy's, not looked at.

        Returns:
            stopped [S] bool, stop_pos [S] int64 block position of the last token to emit, the next step's criteria.
        """
        remaining = self.num_appendable_ids
        length = token_ids.numel() // remaining.numel()
        return remaining <= 0, length - 1 + torch.clamp_max(remaining, 0), self.clone()
