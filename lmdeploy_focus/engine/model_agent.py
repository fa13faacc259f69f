"""The model agent: hands the batch to the decode step, and its report back to LMDeploy."""
import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta, StepContext, step_ctx_manager
from torch import Tensor
from tqdm.auto import tqdm

from ..kernels.dispatch import kernels_for
from ..stages.decoder import Model
from ..stages.state import FocusState
from ..stages.unmask import confidence
from .graph_runner import GraphRunner
from .policy import Costs, Policy
from .row_invariant import make_row_invariant
from .sampling import FocusSamplingInputs, Samplers, expand_rows
from .step_inputs import FocusExtraInputs, FocusStepInputs
from .step_outputs import FocusBatchedOutputs
from .step_runner import StepRunner
from .strategy import FocusModelAgentStrategy


class FocusModelAgent(BaseModelAgent):
    """LMDeploy's agent with our decode step; the forward of a prefill and dummy steps are stock.

    On a GPU the step runs in CUDA graphs (`eager_mode`: the same kernels without), on a CPU with the kernels' twins.
    """

    agent_strategy: FocusModelAgentStrategy
    step_inputs: FocusStepInputs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.misc_config.dllm_config
        self.policy = Policy(options.focus.policy, options.focus.keep is not None)
        self._runner: StepRunner | None = None
        self._samplers: Samplers | None = None
        self._stop_words: Tensor | None = None
        self._context: StepContext | None = None

    @property
    def runner(self) -> StepRunner:
        """Runs the decode steps; made when the first is due, with weights and caches in place."""
        if self._runner is None:
            self._runner = self._build_runner()
        return self._runner

    def build_model(self) -> None:
        """Load the model."""
        super().build_model()
        if self.agent_strategy.params.deterministic:
            make_row_invariant(self.patched_model)

    def warmup(self) -> None:
        """Compile and capture; nothing is captured while serving."""
        from lmdeploy.pytorch.envs import skip_warmup
        if skip_warmup:
            return
        with self.all_context(), torch.cuda.stream(self.stream):
            self._warmup_prefill()
            runner = self.runner
            if isinstance(runner, GraphRunner) and runner.graphs:
                with self._step_context(), tqdm(desc='Capturing FOCUS graphs', disable=self.rank != 0) as bar:
                    runner.capture(self.samplers.named(), _shown(bar))
                    runner.costs = Costs(runner.measured_buckets(), self._agreed(runner.measure()))

    def reset_runtime_state(self) -> None:
        """Forget the running sequences; graphs go on reading their state where it was."""
        state = self.step_inputs.state
        super().reset_runtime_state()
        if state is not None:
            state.clear()
            self.step_inputs.state = state

    def reset_graph_runner(self) -> None:
        """Drop the graphs with LMDeploy's own, before weights or caches move."""
        super().reset_graph_runner()
        self._runner = self._samplers = self._context = None

    @property
    def samplers(self) -> Samplers:
        """Draw tokens on the device."""
        if self._samplers is None:
            self._samplers = Samplers(kernels_for(self.device), self._state(), self.agent_strategy.dllm_mask_token)
        return self._samplers

    def _state(self) -> FocusState:
        """The state of the running sequences."""
        return self.step_inputs.state_for(self.cache_engine.cache_config.max_batches, self.device)

    def _build_runner(self) -> StepRunner:
        model, config = self.patched_model.get_model(), self.cache_engine.cache_config
        caches = [(layer[0], layer[1]) for layer in self.cache_engine.gpu_cache]
        page_size = caches[0][0].size(1)
        options = self.agent_strategy.step_options(page_size)
        gather = self._gather_heads if self.dist_config.attn_tp > 1 else None
        parts = (Model(model.decoder, model.get_logits, caches, kernels_for(self.device), gather), options,
                 self.policy.first.evicting, self._state())
        if self.device == 'cpu':
            return StepRunner(*parts)
        columns = config.num_gpu_blocks * (config.block_size // page_size)
        return GraphRunner(*parts, columns=columns, max_kv=columns * page_size,
                           graphs=not self.backend_config.eager_mode,
                           policy=self.policy if self.policy.adaptive else None)

    def _agreed(self, table: Tensor) -> Tensor:
        """The same on all ranks of tensor parallelism: they have to choose the same steps."""
        if self.dist_config.attn_tp > 1:
            torch.distributed.broadcast(table, group_src=0, group=self.dist_ctx.attn_tp_group.gpu_group)
        return table

    def _gather_heads(self, partial: Tensor) -> Tensor:
        """[S, heads of this rank, L] -> [S, heads, L], in the order of the ranks."""
        group, ranks = self.dist_ctx.attn_tp_group.gpu_group, self.dist_config.attn_tp
        everything = partial.new_empty((ranks, *partial.shape))
        torch.distributed.all_gather_into_tensor(everything, partial, group=group)
        return everything.transpose(0, 1).flatten(1, 2).contiguous()

    @contextmanager
    def _step_context(self) -> Iterator[None]:
        """What stock modules look up while they run; none of ours reads the batch in it, so one dummy serves all."""
        ctx_mgr = self.patched_model.ctx_mgr
        with torch.inference_mode(), torch.cuda.stream(self.stream), step_ctx_manager(ctx_mgr):
            if self._context is None:
                inputs = self.inputs_strategy.make_dummy(1, is_decoding=True, device=self.device,
                                                         vocab_size=self.model_config.vocab_size,
                                                         meta=self.make_dummy_meta)
                self._context = ctx_mgr.build_context(inputs=inputs, model_config=self.model_config,
                                                      cache_config=self.cache_engine.cache_config,
                                                      kv_caches=self.cache_engine.gpu_cache)
            with ctx_mgr.context(self._context):
                yield

    def _get_inputs_from_delta(self, delta: ModelInputsDelta,
                               sampling_inputs: SamplingInputs) -> tuple[ModelInputs, FocusExtraInputs, Any, Any]:
        """The decode batch; nothing of a sequence is copied, its state is where the step reads it."""
        self.step_inputs.reindex(delta)
        self._stop_words = sampling_inputs.stop_words
        return (self.step_inputs.model_inputs, self.step_inputs.extra_inputs, self.step_inputs.stopping_criteria,
                sampling_inputs)

    async def _async_model_forward(self, inputs: ModelInputs, return_logits: bool, cache_inputs: Any = None) -> dict:
        """The forward; a decode step leaves no logits, and a prefill none that nobody reads."""
        if inputs.is_dummy:
            return await super()._async_model_forward(inputs, return_logits, cache_inputs=cache_inputs)
        none = inputs.input_ids.new_empty((1, 0))
        self._state()  # what the step inputs append prefilled sequences to
        if inputs.is_decoding:
            with self._running():
                self.runner.join(self.step_inputs.joined)
                self.step_inputs.joined = 0
                self.runner.forward(inputs.block_offsets, self._stop_words)
            await asyncio.sleep(0)
            return {'logits': none, 'seq_length': None, 'model_metas': None}
        if return_logits or self._is_prefill_input_logprobs(inputs):
            return await super()._async_model_forward(inputs, return_logits, cache_inputs=cache_inputs)
        with self._running():
            done = self.runner.prefill(inputs.input_ids[0], inputs.seq_length, inputs.history_lengths,
                                       inputs.block_offsets)
        if done:
            await asyncio.sleep(0)
            return {'logits': none, 'seq_length': None, 'model_metas': None}
        output = await self.async_forward(inputs, cache_inputs=cache_inputs)
        return {**output, 'logits': none, 'seq_length': None}

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around what may launch kernels of stock modules: replayed graphs need no context."""
        runner = self.runner
        if isinstance(runner, GraphRunner) and runner.captured:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                yield
        else:
            with self._step_context():
                yield

    async def _step_postprocess_with_output(self, last_logits: Tensor, logits: Tensor, inputs: ModelInputs,
                                            sampling_inputs: SamplingInputs, stopping_criteria: Any, model_metas: Any,
                                            need_broadcast_next: bool, extra_inputs: FocusExtraInputs | None = None,
                                            **kwargs: Any) -> tuple:
        """Sampling, unmasking and stopping of a decode step; a prefill decodes nothing, and is stock's otherwise.

        Nothing is broadcast to other ranks of tensor parallelism: they compute the same.
        """
        if not inputs.is_decoding:
            return await super()._step_postprocess_with_output(
                last_logits, logits, inputs, sampling_inputs, stopping_criteria, model_metas, False,
                extra_inputs=extra_inputs, **kwargs)
        report = await self._decide(sampling_inputs)
        outputs = FocusBatchedOutputs.of_report(report.clone(), self.agent_strategy.block_size, self.runner.dense)
        return inputs, extra_inputs, stopping_criteria, None, None, outputs

    async def _step_postprocess_without_output(self, inputs: ModelInputs, last_logits: Tensor,
                                               extra_inputs: FocusExtraInputs, sampling_inputs: SamplingInputs,
                                               need_broadcast_next: bool) -> tuple:
        """The same on a rank that reports nothing."""
        if inputs.is_decoding:
            await self._decide(sampling_inputs)
            return inputs, None, extra_inputs, None
        token_ids, extra_inputs = self.agent_strategy.after_prefill(inputs, extra_inputs)
        return inputs, token_ids, extra_inputs, self.agent_strategy.make_extra_outputs(extra_inputs)

    async def _decide(self, sampling_inputs: FocusSamplingInputs) -> Tensor:
        """Sample the masked kept rows and settle the step: its report."""
        runner, draw = self.runner, self.samplers.take(sampling_inputs)
        with self._running():
            if not sampling_inputs.unusual:
                return runner.decide(draw)
            tokens, scores = runner.sample(draw)
            await self._redraw(sampling_inputs, tokens, scores)
            return runner.settle(tokens, scores)

    async def _redraw(self, sampling_inputs: FocusSamplingInputs, tokens: Tensor, scores: Tensor) -> None:
        """Draw the rows of unusual sequences again by LMDeploy's own processors, in place: tokens and scores [R]."""
        rows = self.runner.logits(sampling_inputs.unusual)
        if rows is None:
            return
        at, theirs, logits, sequence, position = rows
        logits[:, self.agent_strategy.dllm_mask_token] = float('-inf')
        processor = FusedLogitsProcessor(expand_rows(sampling_inputs, sequence, position, self.step_inputs.columns,
                                                     self.agent_strategy.block_size))
        logits, _ = await processor(logits)
        drawn = processor.sampling(logits)
        tokens[at] = torch.where(theirs, drawn, tokens[at])
        scores[at] = torch.where(theirs, confidence(logits, drawn), scores[at])

    async def async_sampling_logits(self, logits: Tensor, inputs: ModelInputs, extra_inputs: FocusExtraInputs,
                                    sampling_inputs: SamplingInputs) -> tuple[Tensor, None, Tensor, FocusExtraInputs]:
        """Of a prefill: token ids [S * L] of the prompts' last blocks (twice, as LMDeploy expects), no logprobs."""
        token_ids, extra_inputs = self.agent_strategy.after_prefill(inputs, extra_inputs)
        return token_ids, None, token_ids, extra_inputs


def _shown(bar: Any) -> Callable[[int, int], None]:
    """Progress of a capture on a tqdm bar."""

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


