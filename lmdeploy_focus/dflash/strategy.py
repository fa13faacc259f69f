"""The strategies that LMDeploy asks its factory for with DFlash, and the state of the batch between steps.

LMDeploy's advance the sampling state by one token a step; a step here emits up to 1 + k.
"""
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs, SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy.pytorch.strategies.ar_spec import ARSpecStrategyFactory
from lmdeploy.pytorch.strategies.ar_spec.engine import ARSpecEngineStrategy
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraInputs, ARSpecModelAgentStrategy
from lmdeploy.pytorch.strategies.ar_spec.model_inputs import ARSpecModelInputsStrategy
from lmdeploy.pytorch.strategies.ar_spec.sampling import ARSpecSamplingStrategy
from lmdeploy.pytorch.strategies.ar_spec.step_inputs import ARSpecStepInputs
from torch import Tensor


@dataclass
class DFlashExtraInputs(ARSpecExtraInputs):
    """LMDeploy's speculative state of the batch, and the tokens that each answer has.

    seen: bool [S, V] on the device, None while no sequence of the batch has a repetition penalty; the rows of those
        that have none are not kept up.
    """
    seen: Tensor | None = None

    def clone(self, **kwargs: Any) -> 'DFlashExtraInputs':
        """A copy with the fields given."""
        return dataclasses.replace(self, **kwargs)

    def merge(self, other: ARSpecExtraInputs) -> 'DFlashExtraInputs':
        """The state of this batch and then the other."""
        assert isinstance(other, DFlashExtraInputs)
        seen = _joined(self, other)  # before the drafts of this batch are the merged ones
        return DFlashExtraInputs(**vars(super().merge(other)) | {'seen': seen})

    def update(self, delta: ModelInputsDelta) -> 'DFlashExtraInputs':
        """The state of the sequences that stay."""
        seen = None if self.seen is None else self.seen[delta.indices]
        return DFlashExtraInputs(**vars(super().update(delta)) | {'seen': seen})


def _joined(first: DFlashExtraInputs, second: DFlashExtraInputs) -> Tensor | None:
    """The `seen` of both batches; the rows of a batch without a penalty are empty."""
    known = first.seen if first.seen is not None else second.seen
    if known is None:
        return None
    parts = [known.new_zeros(len(part.output_draft_token_ids), known.size(1)) if part.seen is None else part.seen
             for part in (first, second)]
    return torch.cat(parts)


class DFlashStrategyFactory(ARSpecStrategyFactory):
    """Builds our strategies; those not named here are LMDeploy's."""

    def build_sampling_strategy(self) -> 'DFlashSamplingStrategy':
        """Sampling parameters, one row a sequence."""
        stock = super().build_sampling_strategy()
        return DFlashSamplingStrategy(stock.pad_token_id, num_spec_tokens=stock.num_spec_tokens)

    def build_model_inputs_strategy(self) -> 'DFlashModelInputsStrategy':
        """Inputs of the target."""
        return DFlashModelInputsStrategy(self.specdecode_config.num_speculative_tokens)

    def build_model_agent_strategy(self) -> 'DFlashModelAgentStrategy':
        """What the model agent asks around a forward."""
        return DFlashModelAgentStrategy(self.specdecode_config.num_speculative_tokens)

    def build_engine_strategy(self, cache_config: Any, scheduler_config: Any) -> 'DFlashEngineStrategy':
        """How much room the scheduler keeps ahead."""
        return DFlashEngineStrategy(cache_config=cache_config, scheduler_config=scheduler_config,
                                    num_spec_tokens=self.specdecode_config.num_speculative_tokens)

    def build_step_inputs(self) -> 'DFlashStepInputs':
        """The decode state of the batch."""
        return DFlashStepInputs(_pad_token_id=self.pad_token_id,
                                _num_spec_tokens=self.specdecode_config.num_speculative_tokens)


class DFlashEngineStrategy(ARSpecEngineStrategy):
    """LMDeploy's with other room: that takes pages for 16 * (k + 1) tokens ahead of a sequence, so that a small cache
    never admits one, but asks for one token too few.

    When the host prepares a step it knows v tokens and has counted v + k. The step before may emit k + 1 and this one
    as many; the block that is then drafted begins at the last of them, so it ends at position v + 3 * k + 1.
    """

    def get_num_required_tokens(self) -> int:
        """Tokens beyond the host's count that a step may write."""
        return 2 * self.num_spec_tokens + 2

    def get_prealloc_size(self, is_decoding: bool) -> int:
        """Tokens beyond the host's count that pages are taken for when some are missing."""
        return max(self.get_num_required_tokens(), self.scheduler_config.prefill_interval)


class DFlashModelInputsStrategy(ARSpecModelInputsStrategy):
    """LMDeploy's, with our extra inputs."""

    def make_dummy_extra_inputs(self, inputs: ModelInputs, meta: Any = None) -> DFlashExtraInputs:
        """Extra inputs of a dummy step."""
        return DFlashExtraInputs(**vars(super().make_dummy_extra_inputs(inputs, meta)))


class DFlashModelAgentStrategy(ARSpecModelAgentStrategy):
    """LMDeploy's, with our extra inputs."""

    def make_extra_inputs(self, seqs: list[Any], model_inputs: ModelInputs) -> DFlashExtraInputs:
        """Extra inputs of a prefill."""
        return DFlashExtraInputs()


class DFlashSamplingStrategy(ARSpecSamplingStrategy):
    """LMDeploy's, but what depends on the number of tokens so far is left to the device, which alone knows it.

    LMDeploy's host bans the stop words for `min_new_tokens` by its own count, a step behind; and it pads the generated
    tokens of a batch with a token that the repetition penalty then counts.
    """

    def make_sampling_inputs(self, seqs: list[Any]) -> SamplingInputs:
        """Sampling inputs of the sequences, int64 token ids padded with -1."""
        sampling_inputs = super().make_sampling_inputs(seqs)
        bad_words = _padded([seq.sampling_param.bad_words for seq in seqs])
        sampling_inputs.bad_words = sampling_inputs.bad_mask = None
        if bad_words.shape[1]:
            sampling_inputs.bad_words = torch.from_numpy(bad_words)
            sampling_inputs.bad_mask = sampling_inputs.bad_words >= 0
        if sampling_inputs.generated_ids_cpu is not None:
            sampling_inputs.generated_ids_cpu = _padded([seq.generated_ids for seq in seqs])
        return sampling_inputs


def _padded(rows: list[Any]) -> np.ndarray:
    """Rows of token ids as one int64 array, -1 behind the end of each."""
    table = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for index, ids in enumerate(rows):
        table[index, :len(ids)] = ids
    return table


@dataclass
class DFlashStepInputs(ARSpecStepInputs):
    """LMDeploy's, with the sampling state advanced by the tokens that a step emitted."""

    def step_decode(self, model_inputs: ModelInputs, extra_inputs: Any, stopping_criteria: Any,
                    sampling_delta: SamplingInputsDelta, next_token_ids: Tensor, model_metas: Any,
                    extra_outputs: Any) -> None:
        """The state for the next decode step."""
        emitted = model_inputs.seq_length - extra_inputs.num_rejected_tokens
        super().step_decode(model_inputs, extra_inputs, stopping_criteria, sampling_delta, next_token_ids, model_metas,
                            extra_outputs)
        # LMDeploy has counted one of them.
        self.sampling_delta.num_ignore_eos = self.sampling_delta.num_ignore_eos - (emitted - 1)
        self.sampling_delta.random_offsets = self.sampling_delta.random_offsets + (emitted - 1)
