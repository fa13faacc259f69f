"""The batch's decode state between two steps: FocusState, and what LMDeploy wants to see of it."""
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraInputs, DLLMStoppingCriteria
from lmdeploy.pytorch.strategies.dllm.step_inputs import DLLMStepInputs
from torch import Tensor

from ..stages.state import FocusState, first_rows
from ..stages.view import CACHED, MASKED
from .step_outputs import FocusExtraOutputs


@dataclass
class FocusExtraInputs(DLLMExtraInputs):
    """Inputs of a prefill beside LMDeploy's; a decode step has all it needs in FocusState.

    Attributes:
        dllm_mask: [S * L] uint8.
        output_start: [S] int64, text position of the first generated token.
        alpha, threshold: [S] float64, each sequence's own.
    """
    output_start: Tensor
    alpha: Tensor
    threshold: Tensor

    def with_mask(self, dllm_mask: Tensor) -> 'FocusExtraInputs':
        """The same with another mask."""
        return FocusExtraInputs(dllm_mask=dllm_mask, output_start=self.output_start, alpha=self.alpha,
                                threshold=self.threshold)


@dataclass
class FocusStepInputs(DLLMStepInputs):
    """Appends, reindexes and shows the sequences of a FocusState; the step itself advances them.

    Attributes:
        state: of the running sequences, None before the first.
        joined: sequences that came since the last decode step.
    """
    state: FocusState | None = None
    joined: int = 0

    def state_for(self, sequences: int, device: torch.device | str) -> FocusState:
        """The state, with room for `sequences`: the same object from then on."""
        if self.state is None:
            self.state = FocusState(sequences, self._block_size, device)
        return self.state

    @property
    def columns(self) -> SimpleNamespace:
        """The running sequences' columns."""
        assert self.state is not None
        return self.state.columns

    def merge_prefill(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                      stopping_criteria: DLLMStoppingCriteria, sampling_delta: SamplingInputsDelta,
                      next_token_ids: Tensor, model_metas: Any, extra_outputs: FocusExtraOutputs) -> None:
        """Add prefilled sequences; each starts with fresh state, also after a second turn or a preemption."""
        assert self.state is not None
        length = self._block_size
        ids, mask = next_token_ids.view(-1, length), extra_outputs.dllm_mask.view(-1, length)
        # a block that the prompt fills is cached; the next one begins
        cached = (mask == CACHED).all(1)
        rows = first_rows(ids.masked_fill(cached[:, None], self._dllm_mask_token), (mask == MASKED) | cached[:, None],
                          inputs.history_lengths + inputs.seq_length - length * ~cached,
                          stopping_criteria.num_appendable_ids, extra_inputs.output_start,
                          sampling_delta.random_offsets + 1, extra_inputs.alpha, extra_inputs.threshold)
        self.state.append(rows)
        self.joined += rows.size(0)

    def reindex(self, delta: ModelInputsDelta) -> None:
        """Keep the sequences of `delta`, and take their pages if it has them."""
        assert self.state is not None
        # indices ascend: as many as there are sequences are all of them
        if delta.indices.numel() != self.state.count:
            self.state.take(delta.indices)
        if delta.block_offsets is None:
            return
        history = self.columns.history
        self.model_inputs = ModelInputs(
            input_ids=self.columns.ids.reshape(1, -1), seq_length=history, history_lengths=history,
            block_offsets=delta.block_offsets, is_decoding=True, num_ignored_history=history,
            max_q_seqlen=self._block_size, max_kv_seqlen=delta.max_kv_seqlen, sum_kv_seqlen=delta.sum_kv_seqlen)

    def step_decode(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the step has advanced the state where it lies."""
