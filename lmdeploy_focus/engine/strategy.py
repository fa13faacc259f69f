"""The strategies that LMDeploy asks its factory for, with focus on."""
from typing import Any

import torch
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.strategies.dllm import DLLMStrategyFactory
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMModelAgentStrategy
from torch import Tensor

from ..config import FocusDLLMConfig
from ..stages.step_options import StepOptions
from ..stages.view import CACHED, UNMASKED
from .knobs import own_knobs
from .row_invariant import SPLITS
from .sampling import FocusSamplingStrategy
from .sequence import FocusSequenceStrategy
from .step_inputs import FocusExtraInputs, FocusStepInputs
from .step_outputs import FocusExtraOutputs
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
    """What the model agent asks around a prefill, and the options of a decode step."""

    def __init__(self, dllm_config: FocusDLLMConfig, dllm_mask_token: int) -> None:
        super().__init__(dllm_config, dllm_mask_token)
        assert dllm_config.focus is not None
        self.dllm_config, self.params = dllm_config, dllm_config.focus

    def step_options(self, page_size: int) -> StepOptions:
        """The options of every step, for pages of G tokens."""
        params, length = self.params, self.block_size
        # rounded up: no block takes more steps than denoising_steps
        per_step = -(-length // self.dllm_config.denoising_steps)
        return StepOptions(selection=params.selection, keep=params.keep, cache=params.cache,
                           kv_visible=params.kv_visible, commit=params.commit,
                           strategy=self.dllm_config.unmasking_strategy.name.lower(), tokens_per_step=per_step,
                           mask_token=self.dllm_mask_token, page_size=page_size,
                           splits=SPLITS if params.deterministic else None)

    def slice_outputs(self, inputs: Tensor, seq_length: Tensor | None) -> Tensor:
        """The last block of each sequence; all rows where `seq_length` is None."""
        return inputs if seq_length is None else super().slice_outputs(inputs, seq_length)

    def slice_extra_inputs(self, extra_inputs: FocusExtraInputs | None, model_inputs: ModelInputs,
                           model_outputs: dict[str, Any], **kwargs: Any) -> FocusExtraInputs | None:
        """The extra inputs of the prompts' last blocks; a decode step has none."""
        if extra_inputs is None:
            return None
        return extra_inputs.with_mask(self.slice_outputs(extra_inputs.dllm_mask, model_inputs.seq_length))

    def make_stopping_criteria(self, seqs: list[Any]) -> FocusStoppingCriteria:
        """Stops of newly prefilled sequences."""
        criteria = super().make_stopping_criteria(seqs)
        return FocusStoppingCriteria(criteria.num_appendable_ids, criteria.output_start_pos)

    def make_extra_inputs(self, seqs: list[Any], model_inputs: ModelInputs) -> FocusExtraInputs:
        """Extra inputs of a prefill, also of one after a preemption: a sequence brings its own knobs along again."""
        extra_inputs = super().make_extra_inputs(seqs, model_inputs)
        alpha, threshold = own_knobs([seq.sampling_param for seq in seqs], self.params.alpha,
                                     self.dllm_config.confidence_threshold)
        return FocusExtraInputs(dllm_mask=extra_inputs.dllm_mask,
                                output_start=torch.tensor([seq.output_start_pos for seq in seqs]),
                                alpha=alpha, threshold=threshold)

    def make_extra_outputs(self, extra_inputs: FocusExtraInputs) -> FocusExtraOutputs:
        """What the host is told after a prefill beside tokens and stops."""
        return FocusExtraOutputs(dllm_mask=extra_inputs.dllm_mask)

    def after_prefill(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs) -> tuple[Tensor, FocusExtraInputs]:
        """Token ids [S * L] of the prompts' last blocks, and their masks; one that the prompt fills is committed.

        Prefill decodes nothing: it is a dense step, which would choose among all masked tokens of the prompt's own
        block, also those that FOCUS would not let compete.
        """
        ids = super().slice_outputs(inputs.input_ids.flatten(), inputs.seq_length)
        mask = extra_inputs.dllm_mask.view(-1, self.block_size)
        full = (mask == UNMASKED).all(1, keepdim=True)
        mask = mask.masked_fill(full, CACHED).flatten()
        return ids, extra_inputs.with_mask(mask)
