"""The strategies that LMDeploy asks its factory for, with focus on."""
from typing import Any

import torch
from lmdeploy.pytorch.config import UnmaskingStrategy
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.strategies.dllm import DLLMStrategyFactory
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMModelAgentStrategy
from torch import Tensor

from ..config import FocusDLLMConfig
from ..stages import step
from ..stages.unmask import UnmaskRule
from .sampling import FocusSamplingStrategy
from .sequence import FocusSequenceStrategy
from .step_inputs import FocusExtraInputs, FocusExtraOutputs, FocusStepInputs
from .stopping import FocusStoppingCriteria


class FocusStrategyFactory(DLLMStrategyFactory):
    """Builds our strategies; those not named here are stock."""

    dllm_config: FocusDLLMConfig

    def build_sampling_strategy(self) -> FocusSamplingStrategy:
        """Sampling parameters, one row a sequence."""
        return FocusSamplingStrategy(self.model_config.bos_token_id)

    def build_model_agent_strategy(self) -> 'FocusModelAgentStrategy':
        """What the model agent asks around a forward."""
        return FocusModelAgentStrategy(self.dllm_config, self.model_config.dllm_mask_token)

    def build_sequence_strategy(self) -> FocusSequenceStrategy:
        """The host's sequences."""
        return FocusSequenceStrategy(block_size=self.dllm_block_length,
                                     dllm_mask_token=self.model_config.dllm_mask_token)

    def build_step_inputs(self) -> FocusStepInputs:
        """The decode state of the batch."""
        return FocusStepInputs(_block_size=self.dllm_block_length, _dllm_mask_token=self.model_config.dllm_mask_token)


class FocusModelAgentStrategy(DLLMModelAgentStrategy):
    """Turns LMDeploy's per-step objects into what the stages take, and back."""

    def __init__(self, dllm_config: FocusDLLMConfig, dllm_mask_token: int) -> None:
        super().__init__(dllm_config, dllm_mask_token)
        params = dllm_config.focus
        assert params is not None
        strategy = dllm_config.unmasking_strategy.name.lower()
        self.rule = UnmaskRule(strategy, dllm_config.confidence_threshold, dllm_config.denoising_steps)
        sequential = dllm_config.unmasking_strategy == UnmaskingStrategy.SEQUENTIAL
        self.options = step.StepOptions(
            alpha=params.alpha, selection=params.selection, keep=params.keep, cache=params.cache,
            kv_visible=params.kv_visible, commit=params.commit,
            sequential=self.rule.tokens_per_step(self.block_size) if sequential else 0)

    def slice_outputs(self, inputs: Tensor, seq_length: Tensor | None) -> Tensor:
        """The last block of each sequence; all rows where `seq_length` is None (a decode step has sliced already)."""
        return inputs if seq_length is None else super().slice_outputs(inputs, seq_length)

    def slice_extra_inputs(self, extra_inputs: FocusExtraInputs, model_inputs: ModelInputs,
                           model_outputs: dict[str, Any], **kwargs: Any) -> FocusExtraInputs:
        """The extra inputs that belong to the model's outputs."""
        denoised = model_outputs.get('denoised')
        mask = extra_inputs.dllm_mask
        if denoised is None:
            mask = self.slice_outputs(mask, model_inputs.seq_length)
        return FocusExtraInputs(dllm_mask=mask, output_start=extra_inputs.output_start, state=extra_inputs.state,
                                denoised=denoised)

    def make_stopping_criteria(self, seqs: list[Any]) -> FocusStoppingCriteria:
        """Stops of newly prefilled sequences."""
        criteria = super().make_stopping_criteria(seqs)
        return FocusStoppingCriteria(criteria.num_appendable_ids, criteria.output_start_pos)

    def make_extra_inputs(self, seqs: list[Any], model_inputs: ModelInputs) -> FocusExtraInputs:
        """Extra inputs of a prefill."""
        extra_inputs = super().make_extra_inputs(seqs, model_inputs)
        return FocusExtraInputs(dllm_mask=extra_inputs.dllm_mask,
                                output_start=torch.tensor([seq.output_start_pos for seq in seqs]))

    def make_extra_outputs(self, extra_inputs: FocusExtraInputs) -> FocusExtraOutputs:
        """What the host is told beside tokens and stops."""
        denoised = extra_inputs.denoised
        if denoised is None:
            return FocusExtraOutputs(dllm_mask=extra_inputs.dllm_mask)
        return FocusExtraOutputs(dllm_mask=extra_inputs.dllm_mask, prefix_rows=denoised.entered,
                                 suffix_rows=denoised.kept, evicting=denoised.kept < denoised.entered)

    def settle(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs, rows: Tensor, tokens: Tensor,
               scores: Tensor) -> tuple[Tensor, FocusExtraInputs]:
        """Unmask, and advance the state of a decode step: token ids [S * L] and the extra inputs after the step.

        Prefill samples no row. It is a dense step, which would choose among all masked tokens of the prompt's own
        block, also those that FOCUS would not let compete; it only commits a block that the prompt fills.
        """
        ids = DLLMModelAgentStrategy.slice_outputs(self, inputs.input_ids.flatten(), inputs.seq_length)
        ids, mask = ids.view(-1, self.block_size), extra_inputs.dllm_mask.view(-1, self.block_size)
        state, denoised = extra_inputs.state, extra_inputs.denoised
        if denoised is None:
            ids, mask = step.unmask(ids, mask, rows, tokens, scores, self.rule)
        else:
            assert state is not None
            ids, mask, state = step.settle(ids, mask, state, denoised.rightmost, rows, tokens, scores, self.rule,
                                           self.options)
        return ids.flatten(), FocusExtraInputs(dllm_mask=mask.flatten(), output_start=extra_inputs.output_start,
                                               state=state, denoised=denoised)
