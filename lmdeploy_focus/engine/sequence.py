"""The host's record of a sequence: where its output starts, what is committed, and what has been counted."""
from dataclasses import dataclass
from typing import Any

import numpy as np
from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.strategies.dllm.sequence import (
    DLLM_CACHED,
    DLLM_MASK_DTYPE,
    DLLM_MASKED,
    DLLM_UNMASKED,
    DLLMSequenceStrategy,
    SchedulerSequenceDLLM,
)


@dataclass
class FocusSequence(SchedulerSequenceDLLM):
    """A block-diffusion sequence.

    A block that is complete is history at once; the device commits it beside the first step of the next one.

    Attributes:
        uncommitted: tokens at the end of the history whose commit no step has reported yet.
    """
    uncommitted: int = 0

    def _update_token_ids_inputs(self, token_ids: np.ndarray, dllm_mask: np.ndarray) -> None:
        # the steps of this sequence end here: a block that still waits for its commit is prefilled with the new turn
        self._num_history_ids -= self.uncommitted
        self.uncommitted = 0
        if self.num_valid_ids == self.num_history_ids:
            # stock leaves a block of masks that was begun and never decoded, and appends the new turn behind it
            self.history_cache.resize(self.num_history_ids)
            self.history_dllm_mask.resize(self.num_history_ids)
        super()._update_token_ids_inputs(token_ids, dllm_mask)
        # stock counts the padding of the prompt's own block, and so ignores a stop word in it
        self.output_start_pos = self.input_end_pos

    def _update_token_ids_prefill(self, token_ids: np.ndarray, dllm_mask: np.ndarray) -> None:
        length = self.dllm_block_length
        self.uncommitted = 0
        if self.num_token_ids > length:
            # stock mixes a relative end with an absolute start, which is wrong from the second turn on
            cached = self.num_token_ids - length
            start = self.num_history_ids
            self.history_dllm_mask[start:start + cached] = DLLM_CACHED
            self._num_history_ids += cached
            self._num_token_ids -= cached
        super()._update_token_ids_decode(token_ids, dllm_mask)

    def _update_token_ids_decode(self, token_ids: np.ndarray, dllm_mask: np.ndarray) -> None:
        self.uncommitted = 0
        super()._update_token_ids_decode(token_ids, dllm_mask)

    def set_step(self, step: int) -> None:
        """Begin anew at a text position; what lies behind it is prefilled again."""
        self.uncommitted = 0
        super().set_step(step)

    def begin_block(self) -> None:
        """Go on to the next block, whose first step commits this one."""
        length = self.dllm_block_length
        start = self.num_history_ids
        self.history_dllm_mask[start:start + length] = DLLM_CACHED
        self.history_cache.append(np.full(length, self.dllm_mask_token, dtype=self.history_cache.dtype))
        self.history_dllm_mask.append(np.full(length, DLLM_MASKED, dtype=DLLM_MASK_DTYPE))
        self._num_history_ids += length
        self.uncommitted = length


class FocusSequenceStrategy(DLLMSequenceStrategy):
    """Makes sequences and reports each step to them."""

    def make_sequence(self, seq_id: int, session: Any, sampling_param: Any = None, adapter_name: str | None = None,
                      migration_request: Any = None, resp_cache: bool = False,
                      preserve_cache: bool = False) -> FocusSequence:
        """A new sequence of `session`."""
        return FocusSequence(seq_id=seq_id, session=session, sampling_param=sampling_param, adapter_name=adapter_name,
                             migration_request=migration_request, resp_cache=resp_cache, preserve_cache=preserve_cache)

    def update_running(self, running: list[FocusSequence], batched_outputs: Any, model_inputs: Any, delta: Any,
                       **kwargs: Any) -> None:
        """Update sequences by a step's outputs; those that go on with a complete block begin the next one."""
        before = [(sequence.status, sequence.uncommitted) for sequence in running]
        super().update_running(running, batched_outputs, model_inputs, delta, **kwargs)
        ran = batched_outputs.extra_outputs.ran
        for index, (sequence, (status, uncommitted)) in enumerate(zip(running, before, strict=True)):
            if not sequence.status == status == MessageStatus.RUNNING:
                continue
            if ran is not None and not ran[index]:
                sequence.uncommitted = uncommitted  # its commit had to wait with it
            elif (sequence.dllm_mask == DLLM_UNMASKED).all():
                sequence.begin_block()
