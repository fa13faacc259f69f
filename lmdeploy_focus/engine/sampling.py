"""Sampling parameters: one row a sequence, expanded to exactly the rows that a step samples."""
from dataclasses import fields, replace
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy.pytorch.strategies.ar.sampling import ARSamplingStrategy
from torch import Tensor


class FocusSamplingStrategy(ARSamplingStrategy):
    """Per-sequence sampling parameters.

    Stock repeats them for every position of a block in an order that mixes up requests; here :func:`expand_rows`
    gathers them by each sampled row's sequence instead. `num_ignore_eos` holds the requests' `min_new_tokens`, and is
    None where all are 0.
    """

    def make_sampling_inputs(self, seqs: list[Any]) -> SamplingInputs:
        """Parameters of `seqs`, one row each."""
        inputs = super().make_sampling_inputs(seqs)
        # the stop words of a request with min_new_tokens are banned by position, not for the whole block
        inputs.bad_words, inputs.bad_mask = _pad_lists([seq.sampling_param.bad_words for seq in seqs])
        minimums = [seq.sampling_param.min_new_tokens for seq in seqs]
        inputs.num_ignore_eos = torch.tensor(minimums) if any(minimums) else None
        return inputs


def is_greedy(inputs: SamplingInputs) -> bool:
    """Whether every row takes its most probable token by the model's own logits."""
    changes = (inputs.temperature, inputs.repetition_penalty, inputs.bad_words, inputs.num_ignore_eos)
    plain = all(value is None for value in changes) and inputs.max_repetition_ngram_size == 0
    return plain and inputs.max_top_k == 1 and not any(inputs.logits_processors)


def _pad_lists(words: list[list[int]]) -> tuple[Tensor | None, Tensor | None]:
    """Token lists as [S, W] int64, -1 beyond the end, and their validity; None, None where all are empty."""
    width = max(map(len, words))
    if width == 0:
        return None, None
    table = torch.tensor([list(row) + [-1] * (width - len(row)) for row in words])
    return table, table >= 0


def expand_rows(inputs: SamplingInputs, sequence: Tensor, position: Tensor, block_start: Tensor, output_start: Tensor,
                block_length: int) -> SamplingInputs:
    """The parameters of R sampled rows.

    Args:
        inputs: of S sequences.
        sequence, position: [R] int64, sequence and block position of each row.
        block_start: [S] text position of each block.
        output_start: [S] text position of each sequence's first generated token.
        block_length: L.
    """
    rows = {f.name: getattr(inputs, f.name)[sequence]
            for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)}
    # a row's own place in the random stream: neighbours in a block must not draw the same number
    rows['random_offsets'] = rows['random_offsets'] * block_length + position
    place = (block_start - output_start)[sequence] + position
    rows['num_ignore_eos'] = rows.get('num_ignore_eos', 0) - place
    processors: list[Any] = [None] * sequence.numel()
    if any(inputs.logits_processors):  # only then does the host need to know whose row each is
        processors = [inputs.logits_processors[index] for index in sequence.tolist()]
    return replace(inputs, batch_size=sequence.numel(), logits_processors=processors, response_formats=(),
                   session_ctx=None, session_to_cleanup=None, generated_ids_cpu=None, **rows)
