"""Stopping: the first of end-of-sequence token, stop word and length cap, in position order."""
from dataclasses import dataclass

import torch
from lmdeploy.pytorch import consts
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMStoppingCriteria
from torch import Tensor

from .step_inputs import FocusExtraInputs


@dataclass
class FocusStoppingCriteria(DLLMStoppingCriteria):
    """Stops of a batch.

    Attributes:
        num_appendable_ids: [S] int64, tokens that may still be appended, counted from the start of the block.
        output_start_pos: [S] int64, text position of the first generated token; stop words before it do not count.
    """

    def clone(self) -> 'FocusStoppingCriteria':
        """The same criteria."""
        return FocusStoppingCriteria(self.num_appendable_ids, self.output_start_pos)

    def merge(self, other: 'DLLMStoppingCriteria') -> 'FocusStoppingCriteria':
        """Append the rows of `other`."""
        return FocusStoppingCriteria(torch.cat([self.num_appendable_ids, other.num_appendable_ids]),
                                     torch.cat([self.output_start_pos, other.output_start_pos]))

    def update(self, delta: ModelInputsDelta) -> 'FocusStoppingCriteria':
        """Keep the sequences of `delta`."""
        return FocusStoppingCriteria(self.num_appendable_ids[delta.indices], self.output_start_pos[delta.indices])

    def step(self, token_ids: Tensor, stop_words: Tensor | None, inputs: ModelInputs | None = None,
             extra_inputs: FocusExtraInputs | None = None) -> tuple[Tensor, Tensor, 'FocusStoppingCriteria']:
        """Which sequences end with this step, and where.

        Args:
            token_ids: [S * L] tokens of the blocks after unmasking.
            stop_words: [S, W] int64, -1 beyond the end of a row's list; None without stop words.
            inputs: of the step.
            extra_inputs: with the masks after unmasking.

        Returns:
            stopped [S] bool, stop_pos [S] int64 block position of the last token to emit, the next step's criteria.
        """
        assert inputs is not None and extra_inputs is not None
        batch = self.num_appendable_ids.size(0)
        tokens = token_ids.view(batch, -1)
        length = tokens.size(1)
        complete = (extra_inputs.dllm_mask.view(batch, length) == consts.DLLM_UNMASKED).all(1)
        remaining = self.num_appendable_ids - complete * length
        stop_pos = torch.where(remaining <= 0, length - 1 + remaining, length - 1)
        stopped = remaining <= 0
        if stop_words is not None:
            block_start = inputs.history_lengths + inputs.seq_length - length
            position = torch.arange(length, device=tokens.device)
            generated = block_start[:, None] + position >= self.output_start_pos[:, None]
            hit = (tokens[:, :, None] == stop_words[:, None, :]).any(-1) & generated
            first = torch.where(hit, position, length).amin(1)
            ends = complete & (first < length)
            stop_pos = torch.where(ends, torch.minimum(stop_pos, first), stop_pos)
            stopped = stopped | ends
            remaining = torch.where(ends, remaining.clamp_max(0), remaining)
        return stopped, stop_pos, FocusStoppingCriteria(remaining, self.output_start_pos)
