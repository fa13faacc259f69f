"""The model agent: hands the batch to the decode step, samples the masked kept rows, hands the result back."""
import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
from lmdeploy.pytorch.model_inputs import ModelInputs, step_ctx_manager
from torch import Tensor
from tqdm.auto import tqdm

from ..kernels.dispatch import kernels_for
from ..stages import step
from ..stages.unmask import confidence
from .denoised import Denoised, from_stages, from_static_step
from .graph_runner import FocusGraphRunner
from .policy import EvictionPolicy
from .sampling import expand_rows, is_greedy
from .static_step import StaticStep
from .step_inputs import FocusExtraInputs
from .strategy import FocusModelAgentStrategy


class FocusModelAgent(BaseModelAgent):
    """LMDeploy's agent with our decode step; prefill and dummy steps are stock.

    On a GPU the step runs on fixed buffers and in CUDA graphs (`eager_mode`: without graphs), on a CPU stage by stage.
    """

    agent_strategy: FocusModelAgentStrategy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy = EvictionPolicy(self.misc_config.dllm_config.focus.policy)
        self._runner: FocusGraphRunner | None = None

    def fixed_shapes(self) -> bool:
        """Whether the step runs on fixed buffers."""
        return self.device == 'cuda'

    def warmup(self) -> None:
        """Compile and capture; nothing is captured while serving."""
        from lmdeploy.pytorch.envs import skip_warmup
        if skip_warmup:
            return
        with self.all_context(), torch.cuda.stream(self.stream):
            self._warmup_prefill()
            if self.fixed_shapes():
                with self._step_context(None), tqdm(desc='Capturing FOCUS graphs', disable=self.rank != 0) as bar:
                    self._build_runner().capture(_shown(bar))

    def reset_graph_runner(self) -> None:
        """Drop the graphs with LMDeploy's own, before weights or caches move."""
        super().reset_graph_runner()
        self._runner = None

    def _build_runner(self) -> FocusGraphRunner:
        if self._runner is None:
            model, caches = self.patched_model.get_model(), self._caches()
            page_size, config = caches[0][0].size(1), self.cache_engine.cache_config
            columns = config.num_gpu_blocks * (config.block_size // page_size)
            fixed = StaticStep(model.decoder, model.get_logits, caches, kernels_for(self.device),
                               self.agent_strategy.options, self.agent_strategy.dllm_mask_token,
                               sequences=config.max_batches, length=self.agent_strategy.block_size, columns=columns,
                               max_kv=columns * page_size)
            graphs = self.device == 'cuda' and not self.backend_config.eager_mode
            self._runner = FocusGraphRunner(fixed, self.policy.evicting(), graphs)
        return self._runner

    def _caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer[0], layer[1]) for layer in self.cache_engine.gpu_cache]

    @contextmanager
    def _step_context(self, inputs: ModelInputs | None) -> Any:
        """What stock modules look up while they run; a dummy batch where there is none."""
        ctx_mgr = self.patched_model.ctx_mgr
        if inputs is None:
            inputs = self.inputs_strategy.make_dummy(1, is_decoding=True, device=self.device,
                                                     vocab_size=self.model_config.vocab_size, meta=self.make_dummy_meta)
        with torch.inference_mode(), torch.cuda.stream(self.stream), step_ctx_manager(ctx_mgr):
            context = ctx_mgr.build_context(inputs=inputs, model_config=self.model_config,
                                            cache_config=self.cache_engine.cache_config,
                                            kv_caches=self.cache_engine.gpu_cache)
            with ctx_mgr.context(context):
                yield

    def _by_stages(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs) -> Denoised:
        """The forward, stage by stage."""
        length, options, state = self.agent_strategy.block_size, self.agent_strategy.options, extra_inputs.state
        assert state is not None
        caches, model = self._caches(), self.patched_model.get_model()
        with self._step_context(inputs):
            view = step.enter(inputs.input_ids.view(-1, length), extra_inputs.dllm_mask.view(-1, length), state,
                              inputs.history_lengths, inputs.block_offsets, caches[0][0].size(1), inputs.max_kv_seqlen,
                              options)
            denoised = step.denoise(model.decoder, caches, view, state, options, self.policy.evicting())
            return from_stages(denoised, self.get_logits(denoised.hidden[:, denoised.kept.masked])[0])

    async def _on_buffers(self, inputs: ModelInputs, extra_inputs: FocusExtraInputs) -> Denoised:
        """The forward on fixed buffers. The row count is the step's only read-back, awaited off the event loop."""
        length, state = self.agent_strategy.block_size, extra_inputs.state
        assert state is not None
        with self._step_context(inputs):
            runner = self._build_runner()
            runner.begin(inputs.input_ids.view(-1, length), extra_inputs.dllm_mask.view(-1, length),
                         inputs.history_lengths, inputs.block_offsets, state)
        while (rows := runner.rows_kept()) is None:
            await asyncio.sleep(0)
        with self._step_context(inputs):
            return from_static_step(runner, rows)

    async def _async_model_forward(self, inputs: ModelInputs, return_logits: bool, cache_inputs: Any = None) -> dict:
        """The forward, up to logits: [1, R, V] of the masked kept rows in a decode step."""
        if not inputs.is_decoding or inputs.is_dummy:
            return await super()._async_model_forward(inputs, return_logits, cache_inputs=cache_inputs)
        extra_inputs = self.step_inputs.extra_inputs
        if self.fixed_shapes():
            denoised = await self._on_buffers(inputs, extra_inputs)
        else:
            denoised = self._by_stages(inputs, extra_inputs)
            await asyncio.sleep(0)
        return {'logits': denoised.logits[None], 'denoised': denoised, 'seq_length': None, 'model_metas': None}

    async def async_sampling_logits(self, logits: Tensor, inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                                    sampling_inputs: SamplingInputs) -> tuple[Tensor, None, Tensor, FocusExtraInputs]:
        """Sample R rows, unmask, and advance the state; prefill samples none.

        Args:
            logits: [R, V], changed in place.
            inputs, extra_inputs: of the step.
            sampling_inputs: one row a sequence.

        Returns:
            Token ids [S * L] (twice, as LMDeploy expects), no logprobs, the extra inputs after the step.
        """
        strategy, length = self.agent_strategy, self.agent_strategy.block_size
        denoised = extra_inputs.denoised
        if denoised is None:  # prefill
            none = inputs.input_ids.new_empty(0)
            token_ids, extra_inputs = strategy.settle(inputs, extra_inputs, none, none, none.float())
            return token_ids, None, token_ids, extra_inputs
        sequence, position = denoised.sequence, denoised.position
        rows = torch.where(sequence >= 0, sequence * length + position, -1)
        if denoised.greedy is not None and is_greedy(sampling_inputs):
            tokens, scores = denoised.greedy
        else:
            start = inputs.history_lengths + inputs.seq_length - length
            params = expand_rows(sampling_inputs, sequence.clamp_min(0), position, start, extra_inputs.output_start,
                                 length)
            # a mask token that wins the argmax would be committed as text
            logits[:, strategy.dllm_mask_token] = float('-inf')
            processor = FusedLogitsProcessor(params)
            logits, _ = await processor(logits)
            tokens = processor.sampling(logits)
            scores = confidence(logits, tokens)
        token_ids, extra_inputs = strategy.settle(inputs, extra_inputs, rows, tokens, scores)
        return token_ids, None, token_ids, extra_inputs


def _shown(bar: Any) -> Callable[[int, int], None]:
    """Progress of a capture on a tqdm bar."""

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show
