"""The batch's decode state between two steps: LMDeploy's token ids and masks with FocusState beside them."""
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch import consts
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy.pytorch.strategies.ar.model_inputs import merge_model_inputs
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraInputs, DLLMExtraOutputs, DLLMStoppingCriteria
from lmdeploy.pytorch.strategies.dllm.step_inputs import (
    DLLMStepInputs,
    _get_model_inputs_next_decoding,
    _reindex_model_inputs_dllm,
    _update_dllm,
)
from torch import Tensor

from ..stages.state import FocusState
from .denoised import Denoised


@dataclass
class FocusExtraInputs(DLLMExtraInputs):
    """Per-step inputs beside LMDeploy's.

    Attributes:
        dllm_mask: [S * L] uint8.
        output_start: [S] int64, text position of the first generated token.
        state: of the block, None before the first decode step.
        denoised: what this step's forward left for sampling, None in prefill.
    """
    output_start: Tensor
    state: FocusState | None = None
    denoised: Denoised | None = None

    def merge(self, other: 'FocusExtraInputs') -> 'FocusExtraInputs':
        """Append the rows of `other`; both are between steps."""
        assert self.state is not None and other.state is not None
        return FocusExtraInputs(dllm_mask=torch.cat([self.dllm_mask, other.dllm_mask]),
                                output_start=torch.cat([self.output_start, other.output_start]),
                                state=self.state.merge(other.state))

    def reindex(self, indices: Tensor, block_length: int) -> 'FocusExtraInputs':
        """Keep the sequences `indices`."""
        assert self.state is not None
        return FocusExtraInputs(dllm_mask=self.dllm_mask.view(-1, block_length)[indices].flatten(),
                                output_start=self.output_start[indices],
                                state=self.state.reindex(indices))


@dataclass
class FocusExtraOutputs(DLLMExtraOutputs):
    """Per-step outputs beside LMDeploy's, for statistics; None in prefill.

    Attributes:
        prefix_rows, suffix_rows: [S] int64, rows of each sequence before and after eviction.
        evicting: [S] bool, sequences that lost rows.
    """
    prefix_rows: Tensor | None = None
    suffix_rows: Tensor | None = None
    evicting: Tensor | None = None


@dataclass
class FocusStepInputs(DLLMStepInputs):
    """Merges, reindexes and advances LMDeploy's step inputs and FocusState together."""

    def merge_prefill(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                      stopping_criteria: DLLMStoppingCriteria, sampling_delta: SamplingInputsDelta,
                      next_token_ids: Tensor, model_metas: Any, extra_outputs: FocusExtraOutputs) -> None:
        """Add prefilled sequences; each starts with fresh state, also after a second turn or a preemption."""
        length = self._block_size
        ids, mask, step_seqlens = _update_dllm(next_token_ids, extra_outputs.dllm_mask, inputs.seq_length, length,
                                               self._dllm_mask_token)
        inputs = _get_model_inputs_next_decoding(inputs, ids, model_metas=model_metas, max_q_seqlen=length,
                                                 step_seqlens=step_seqlens)
        # What prefill has left of the prompt's own block are masks, which later steps are not to see: nothing counts
        # as having been through the layers, and the block begins as any other does.
        state = FocusState.fresh(torch.full_like(inputs.history_lengths, -1))
        extra_inputs = FocusExtraInputs(dllm_mask=mask, output_start=extra_inputs.output_start, state=state)
        delta = _next_offsets(sampling_delta)
        if self.model_inputs is None:  # type: ignore[has-type]
            self.model_inputs, self.extra_inputs = inputs, extra_inputs
            self.stopping_criteria, self.sampling_delta = stopping_criteria.clone(), delta
            return
        self.model_inputs = merge_model_inputs(self.model_inputs, inputs)
        self.extra_inputs = self.extra_inputs.merge(extra_inputs)
        self.stopping_criteria = self.stopping_criteria.merge(stopping_criteria)
        self.sampling_delta = SamplingInputsDelta(
            random_offsets=torch.cat([self.sampling_delta.random_offsets, delta.random_offsets]))

    def reindex(self, delta: ModelInputsDelta) -> None:
        """Keep the sequences of `delta`."""
        self.model_inputs = _reindex_model_inputs_dllm(self.model_inputs, delta, self._block_size)
        self.extra_inputs = self.extra_inputs.reindex(delta.indices, self._block_size)
        self.stopping_criteria = self.stopping_criteria.update(delta)
        self.sampling_delta = SamplingInputsDelta(random_offsets=self.sampling_delta.random_offsets[delta.indices])

    def step_decode(self, model_inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                    stopping_criteria: DLLMStoppingCriteria, sampling_delta: SamplingInputsDelta,
                    next_token_ids: Tensor, model_metas: Any, extra_outputs: FocusExtraOutputs) -> None:
        """Advance to the next step: the same block again, or a block of masks where the commit is done."""
        assert extra_inputs.state is not None
        complete = self._complete(extra_inputs.dllm_mask)
        ids, mask, step_seqlens = _update_dllm(next_token_ids, extra_inputs.dllm_mask, model_inputs.seq_length,
                                               self._block_size, self._dllm_mask_token)
        model_inputs.model_metas = model_metas
        self.model_inputs = model_inputs.step(ids, step_seqlens)
        self.extra_inputs = FocusExtraInputs(dllm_mask=mask, output_start=extra_inputs.output_start,
                                             state=extra_inputs.state.restart(complete))
        self.stopping_criteria = stopping_criteria.clone()
        self.sampling_delta = _next_offsets(sampling_delta)

    def _complete(self, mask: Tensor) -> Tensor:
        """[S] bool, blocks whose commit this step has done."""
        return (mask.view(-1, self._block_size) == consts.DLLM_CACHED).all(1)


def _next_offsets(delta: SamplingInputsDelta) -> SamplingInputsDelta:
    """Every step draws from its own place in a sequence's random stream."""
    return SamplingInputsDelta(random_offsets=delta.random_offsets + 1)
