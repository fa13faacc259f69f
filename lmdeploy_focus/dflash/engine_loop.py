"""LMDeploy's engine loop, telling with each output of a request how many drafted tokens it has accepted so far.

LMDeploy tells the count of the output's own step. But an output that nobody has fetched yet is replaced by the next one
(in the loop's queue, and again in the pipe between engine process and server), and the count of its step is lost.
"""
from typing import Any

from lmdeploy.pytorch.engine.engine_loop import EngineLoop

from .acceptance import Acceptance, accepted_in_step


class DFlashEngineLoop(EngineLoop):
    """LMDeploy's, with an `Acceptance` of all steps of the request so far as `spec_info` of each output."""

    @classmethod
    def of(cls, loop: EngineLoop) -> 'DFlashEngineLoop':
        """A loop of the same parts as `loop`, which has not started."""
        return cls(req_manager=loop.req_manager, scheduler=loop.scheduler, state_checkpoints=loop.state_checkpoints,
                   executor=loop.executor, seq_strategy=loop.seq_strategy, inputs_maker=loop.inputs_maker,
                   config=loop.config, engine_conn=loop.engine_conn)

    def _make_infer_outputs(self, batched_outputs: Any, running: list[Any], model_inputs: Any,
                            delta: Any) -> dict[int, Any]:
        if model_inputs is None:  # a decode step
            for sequence, accepted in accepted_in_step(batched_outputs, running):
                self._steps_of(sequence.resp)[accepted] += 1
        outputs = super()._make_infer_outputs(batched_outputs, running=running, model_inputs=model_inputs, delta=delta)
        for output in outputs.values():
            output.req_metrics.spec_info = Acceptance(tuple(self._steps_of(output.resp)))
        return outputs

    def _steps_of(self, response: Any) -> list[int]:
        """The counts of a request's steps; LMDeploy's response object lives as long as the request, through preemption
        too, while a sequence may serve the next request of its session."""
        if not hasattr(response, 'steps_by_accepted'):
            response.steps_by_accepted = list(Acceptance.none(self.config.num_speculative_tokens).steps_by_accepted)
        return response.steps_by_accepted
