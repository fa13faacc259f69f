"""The drafter's side of the model agent: sample every verified position, accept, then draft the next block."""
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs, _torch_topk
from lmdeploy.pytorch.engine.model_agent.agent import BatchedLogProbs
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent
from torch import Tensor

from .history import expand, penalise, seen_at_start, seen_by_rows
from .proposer import DFlashProposer
from .replay import Replay
from .replay import current as current_replay
from .strategy import DFlashExtraInputs
from .targets import DFlashBuildContext
from .verify import accept


class DFlashSpecModelAgent(SpecModelAgent):
    """LMDeploy's speculative agent with our proposer and our acceptance.

    Letters: S sequences, k drafted tokens, R rows of a sequence whose logits there are, 1 + k in a decode step and one,
    the prompt's last, after a prefill; V vocabulary.
    """

    _replay: Replay | None = None  # of the throughput study alone

    def __init__(self, specdecode_config: Any, *args: Any, device: str = 'cuda', **kwargs: Any) -> None:
        super().__init__(specdecode_config, *args, device=device, **kwargs)
        self.proposer = DFlashProposer(specdecode_config, device=device)
        self.proposer.guided_helper = self.guided_helper
        self._replay = current_replay()

    def build_model_context(self) -> DFlashBuildContext:
        """What the models are built for."""
        return DFlashBuildContext(**vars(super().build_model_context()))

    async def async_sampling_logits(self, model_inputs: ModelInputs, extra_inputs: DFlashExtraInputs,
                                    sampling_inputs: SamplingInputs) -> DFlashExtraInputs:
        """Sample every row of the target with its own history and accept.

        Args:
            model_inputs: the target's inputs of the step.
            extra_inputs: the target's logits [S * R, V] and the drafted tokens [S, k].
            sampling_inputs: one row a sequence.

        Returns:
            `extra_inputs` with the emitted tokens `output_token_ids` [S, R], -1 after the last, which is also
            `next_token_ids` [S]; `num_rejected_tokens` [S]; `logprobs` of the rows, if asked for; the new `seen`.
        """
        sequences = model_inputs.seq_length.size(0)
        none_rejected = torch.zeros_like(model_inputs.seq_length)
        last_rows = model_inputs.seq_length.cumsum(0) - 1
        if model_inputs.is_dummy or (model_inputs.is_chunk and not model_inputs.is_last_chunk):
            rows = 1 + self.num_spec_tokens if model_inputs.is_decoding else 1
            nothing = model_inputs.input_ids.new_zeros(sequences, rows)
            return extra_inputs.clone(next_token_ids=nothing[:, 0], output_token_ids=nothing, target_logits=None,
                                      num_rejected_tokens=none_rejected, last_token_indices=last_rows, logprobs=None)
        drafted = extra_inputs.output_draft_token_ids if model_inputs.is_decoding else None
        logits = extra_inputs.target_logits.view(sequences, -1, extra_inputs.target_logits.size(-1))
        seen = self._seen(extra_inputs, sampling_inputs, logits.size(-1), model_inputs.is_decoding)
        sampled, raw_logprobs = await self._sample(logits, drafted, seen, sampling_inputs)
        if drafted is None:
            emitted, rejected, last = sampled, none_rejected, sampled[:, 0]
        else:
            emitted, rejected, last = accept(sampled, drafted, self._replay)
        await self._advance_grammars(sampling_inputs, emitted, rejected, last)
        if seen is not None:
            seen = seen | seen_at_start(emitted, seen.size(1))
        return extra_inputs.clone(next_token_ids=last, output_token_ids=emitted, num_rejected_tokens=rejected,
                                  last_token_indices=last_rows - rejected, target_logits=None, seen=seen,
                                  logprobs=_logprobs_of(raw_logprobs, emitted, sampling_inputs.max_num_logprobs))

    @staticmethod
    def _seen(extra_inputs: DFlashExtraInputs, sampling_inputs: SamplingInputs, vocabulary: int,
              is_decoding: bool) -> Tensor | None:
        """The tokens that each answer has, bool [S, V]; None where nothing is penalised."""
        if sampling_inputs.repetition_penalty is None:
            return None
        if is_decoding:
            return extra_inputs.seen
        # The host knows all of a sequence that is prefilled, also of one that lost its pages in the middle.
        return seen_at_start(sampling_inputs.generated_ids, vocabulary)

    async def _sample(self, logits: Tensor, drafted: Tensor | None, seen: Tensor | None,
                      sampling_inputs: SamplingInputs) -> tuple[Tensor, Tensor | None]:
        """The target's sample of every row [S, R], and the rows' log probabilities [S * R, V] if any are asked for."""
        sequences, rows, vocabulary = logits.shape
        raw_logprobs = self._raw_logprobs(logits.flatten(0, 1), sampling_inputs)
        if seen is not None:
            before = seen[:, None] if drafted is None else seen_by_rows(seen, drafted)
            logits = penalise(logits, before, sampling_inputs.repetition_penalty)
        processor = FusedLogitsProcessor(expand(sampling_inputs, rows))
        scores, _ = await processor(logits.flatten(0, 1))
        grammars = self._grammars(sampling_inputs)
        if grammars:
            drafts = scores.new_zeros(sequences, 0, dtype=torch.long) if drafted is None else drafted
            await self.guided_helper.apply_serial_bitmask(scores.view(sequences, rows, vocabulary), grammars, drafts,
                                                          rows - 1)
        return processor.sampling(scores).view(sequences, rows), raw_logprobs

    def _raw_logprobs(self, logits: Tensor, sampling_inputs: SamplingInputs) -> Tensor | None:
        """What LMDeploy reports as log probabilities, before anything changes the logits."""
        if sampling_inputs.max_num_logprobs < 0 or self.misc_config.logprobs_mode is None:
            return None
        if self.misc_config.logprobs_mode == 'raw_logits':
            return logits.clone()
        return logits.log_softmax(dim=-1)

    def _grammars(self, sampling_inputs: SamplingInputs) -> dict[int, Any]:
        self.guided_helper.cleanup_sessions(sampling_inputs.session_to_cleanup)
        return self.guided_helper.get_processors(sampling_inputs.session_ctx, sampling_inputs.response_formats)

    async def _advance_grammars(self, sampling_inputs: SamplingInputs, emitted: Tensor, rejected: Tensor,
                                last: Tensor) -> None:
        grammars = self._grammars(sampling_inputs)
        await self.guided_helper.accept_rejection_sampled_tokens(grammars, rejected, emitted, last, emitted.size(1) - 1)


def build_agent(specdecode_config: Any, backend_config: Any, dist_ctx: Any, inputs_strategy: Any, agent_strategy: Any,
                misc_config: Any, device: str = 'cuda', guided_decoding_manager: Any = None) -> DFlashSpecModelAgent:
    """LMDeploy's `build_spec_agent` with our class; it names the device 'cuda' whatever the engine's."""
    device = 'cpu' if backend_config.device_type == 'cpu' else device
    return DFlashSpecModelAgent(specdecode_config, backend_config, inputs_strategy, agent_strategy, misc_config,
                                dist_ctx, device=device, guided_decoding_manager=guided_decoding_manager)


def _logprobs_of(raw_logprobs: Tensor | None, emitted: Tensor, number: int) -> BatchedLogProbs | None:
    """Of every row the log probability of its token and of the best ones; the token is -1 where none was emitted."""
    if raw_logprobs is None or number <= 0:
        return None
    tokens = emitted.flatten()[:, None]
    best, best_tokens = _torch_topk(raw_logprobs, number, dim=-1)
    return BatchedLogProbs(vals=torch.cat([raw_logprobs.gather(-1, tokens.clamp_min(0)), best], -1),
                           indices=torch.cat([tokens, best_tokens], -1).to(torch.int32))
