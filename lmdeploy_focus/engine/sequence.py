"""The host's record of a sequence: where its output starts, and what has been counted."""
from dataclasses import dataclass
from typing import Any

import numpy as np
from lmdeploy.pytorch.strategies.dllm.sequence import (
    DLLM_CACHED,
    DLLMSequenceStrategy,
    SchedulerSequenceDLLM,
)


@dataclass
class FocusSequence(SchedulerSequenceDLLM):
    """A block-diffusion sequence."""

    def _update_token_ids_inputs(self, token_ids: np.ndarray, dllm_mask: np.ndarray) -> None:
        super()._update_token_ids_inputs(token_ids, dllm_mask)
        # stock counts the padding of the prompt's own block, and so ignores a stop word in it
        self.output_start_pos = self.input_end_pos

    def _update_token_ids_prefill(self, token_ids: np.ndarray, dllm_mask: np.ndarray) -> None:
        length = self.dllm_block_length
        if self.num_token_ids > length:
            # stock mixes a relative end with an absolute start, which is wrong from the second turn on
            cached = self.num_token_ids - length
            start = self.num_history_ids
            self.history_dllm_mask[start:start + cached] = DLLM_CACHED
            self._num_history_ids += cached
            self._num_token_ids -= cached
        self._update_token_ids_decode(token_ids, dllm_mask)


class FocusSequenceStrategy(DLLMSequenceStrategy):
    """Makes sequences and reports each step to them."""

    def make_sequence(self, seq_id: int, session: Any, sampling_param: Any = None, adapter_name: str | None = None,
                      migration_request: Any = None, resp_cache: bool = False,
                      preserve_cache: bool = False) -> FocusSequence:
        """A new sequence of `session`."""
        return FocusSequence(seq_id=seq_id, session=session, sampling_param=sampling_param, adapter_name=adapter_name,
                             migration_request=migration_request, resp_cache=resp_cache, preserve_cache=preserve_cache)


