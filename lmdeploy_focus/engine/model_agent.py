"""The model agent: hands the batch to the stages, samples the masked kept rows, hands the result back."""
import asyncio
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
from lmdeploy.pytorch.model_inputs import ModelInputs, step_ctx_manager
from torch import Tensor

from ..stages import step
from ..stages.unmask import confidence
from .graph_runner import FocusGraphRunner
from .policy import EvictionPolicy
from .sampling import expand_rows
from .step_inputs import FocusExtraInputs
from .strategy import FocusModelAgentStrategy


class FocusModelAgent(BaseModelAgent):
    """LMDeploy's agent with our decode step; prefill and dummy steps are stock."""

    agent_strategy: FocusModelAgentStrategy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params = self.misc_config.dllm_config.focus
        self.policy = EvictionPolicy(params.policy)
        self.focus_runner: FocusGraphRunner

    def build_graph_runner(self) -> None:
        """Build LMDeploy's runner for prefill and ours for the decode step."""
        super().build_graph_runner()
        self.focus_runner = FocusGraphRunner(self.patched_model.get_model())

    @torch.inference_mode()
    def _denoise(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs) -> step.Denoised:
        """The forward of a decode step."""
        length = self.agent_strategy.block_size
        ctx_mgr = self.patched_model.ctx_mgr
        caches = [(layer[0], layer[1]) for layer in self.cache_engine.gpu_cache]
        with torch.cuda.stream(self.stream), step_ctx_manager(ctx_mgr):
            context = ctx_mgr.build_context(inputs=inputs, model_config=self.model_config,
                                            cache_config=self.cache_engine.cache_config,
                                            kv_caches=self.cache_engine.gpu_cache)
            with ctx_mgr.context(context):
                options, state = self.agent_strategy.options, extra_inputs.state
                assert state is not None
                view = step.enter(inputs.input_ids.view(-1, length), extra_inputs.dllm_mask.view(-1, length), state,
                                  inputs.history_lengths, inputs.block_offsets, caches[0][0].size(1),
                                  inputs.max_kv_seqlen, options)
                return self.focus_runner.denoise(caches, view, state, options, self.policy.evicting())

    async def _async_model_forward(self, inputs: ModelInputs, return_logits: bool, cache_inputs: Any = None) -> dict:
        """The forward, up to logits: [1, R, V] of the masked kept rows in a decode step."""
        if not inputs.is_decoding or inputs.is_dummy:
            return await super()._async_model_forward(inputs, return_logits, cache_inputs=cache_inputs)
        denoised = self._denoise(inputs, self.step_inputs.extra_inputs)
        await asyncio.sleep(0)
        hidden = denoised.hidden[:, denoised.kept.masked]
        return {'hidden_states': hidden, 'logits': self.get_logits(hidden), 'denoised': denoised, 'seq_length': None,
                'model_metas': None}

    async def async_sampling_logits(self, logits: Tensor, inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                                    sampling_inputs: SamplingInputs) -> tuple[Tensor, None, Tensor, FocusExtraInputs]:
        """Sample R rows, unmask, and advance the state.

        Args:
            logits: [R, V], changed in place.
            inputs, extra_inputs: of the step.
            sampling_inputs: one row a sequence.

        Returns:
            Token ids [S * L] (twice, as LMDeploy expects), no logprobs, the extra inputs after the step.
        """
        strategy = self.agent_strategy
        sequence, position = strategy.sampled_rows(inputs, extra_inputs)
        length = strategy.block_size
        block_start = inputs.history_lengths + inputs.seq_length - length
        rows = expand_rows(sampling_inputs, sequence, position, block_start, extra_inputs.output_start, length)
        # a mask token that wins the argmax would be committed as text
        logits[:, strategy.dllm_mask_token] = float('-inf')
        processor = FusedLogitsProcessor(rows)
        logits, _ = await processor(logits)
        tokens = processor.sampling(logits)
        scores = confidence(logits, tokens)
        token_ids, extra_inputs = strategy.settle(inputs, extra_inputs, sequence * length + position, tokens, scores)
        return token_ids, None, token_ids, extra_inputs
