"""What each verified row knows of the tokens before it: the sampling inputs of plain decoding, one row a position.

Row j of a sequence follows the tokens emitted so far and j drafted ones. Its place in the random stream, what is left
of `min_new_tokens`, and the tokens that a repetition penalty counts are those that plain decoding would have there.

Letters: S sequences, R rows of each, V vocabulary.
"""
import dataclasses

import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy.pytorch.spec_decode.spec_agent import _expand_sampling_inputs
from torch import Tensor


def expand(sampling_inputs: SamplingInputs, rows: int) -> SamplingInputs:
    """The sampling inputs of S sequences as those of S * R rows, a sequence's rows one after another.

    Without the repetition penalty, which `penalise` applies, and without log probabilities, which are taken before it.
    """
    per_sequence = dataclasses.replace(sampling_inputs, repetition_penalty=None, generated_ids=None,
                                       generated_ids_cpu=None, max_num_logprobs=-1)
    expanded = _expand_sampling_inputs(per_sequence, rows)
    ahead = torch.arange(rows, device=expanded.num_ignore_eos.device).repeat(sampling_inputs.batch_size)
    return dataclasses.replace(expanded, num_ignore_eos=expanded.num_ignore_eos - ahead)


def seen_at_start(generated_ids: Tensor, vocabulary: int) -> Tensor:
    """Which tokens an answer has, bool [S, V], from the generated token ids [S, n], -1 for none."""
    # Column V takes what is none.
    ids = torch.where(generated_ids < 0, vocabulary, generated_ids)
    seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids, True)[:, :-1]


def seen_by_rows(seen: Tensor, drafted: Tensor) -> Tensor:
    """Which tokens each row has before it, bool [S, R, V], from those of the answers [S, V] and the drafted [S, k]."""
    rows = drafted.size(1) + 1
    before = seen[:, None].repeat(1, rows, 1)
    for row in range(1, rows):
        before[:, row:].scatter_(2, drafted[:, row - 1, None, None].expand(-1, rows - row, 1), True)
    return before


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """The repetition penalty of CTRL (arXiv 1909.05858, section 4.1) as LMDeploy applies it, to every seen token once.

    Args:
        logits: [S, R, V].
        seen: bool [S, R, V].
        penalty: [S].

    Returns:
        A new tensor like `logits`.
    """
    factor = penalty.to(logits.dtype)[:, None, None]
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
