"""Sampling: parameters one row a sequence; draws on the device, and by LMDeploy's processors for unusual sequences."""
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy.pytorch.strategies.ar.sampling import ARSamplingStrategy
from torch import Tensor

from ..kernels.layout import state_columns
from ..stages.state import FocusState
from ..stages.unmask import Sampler

LARGEST_TOP_K = 64  # of the kernel `sampled_head`
WORDS = 64  # most banned tokens of a sequence that draws on the device take; stop tokens, where they are ignored


@dataclass
class FocusSamplingInputs(SamplingInputs):
    """LMDeploy's sampling parameters.

    Attributes:
        unusual: indices of the sequences whose parameters the device does not know; the others' draws, seeded ones too,
            do not depend on whether there are any.
    """
    unusual: tuple[int, ...] = ()

    def to_device(self, device: str, non_blocking: bool = False) -> 'FocusSamplingInputs':
        """The same with tensors on a device."""
        stock = SamplingInputs(**{f.name: getattr(self, f.name) for f in fields(SamplingInputs)})
        return FocusSamplingInputs(**vars(stock.to_device(device, non_blocking)), unusual=self.unusual)


def is_unusual(param: Any) -> bool:
    """Whether a request's SamplingParam needs LMDeploy's processors."""
    return bool(param.repetition_penalty != 1.0 or param.min_new_tokens or param.repetition_ngram_size
                or param.logits_processors or not 1 <= param.top_k <= LARGEST_TOP_K or len(param.bad_words) > WORDS)


class FocusSamplingStrategy(ARSamplingStrategy):
    """Per-sequence sampling parameters.

    Stock repeats them for every position of a block in an order that mixes up requests; here every sampled row looks
    up those of its sequence instead. `num_ignore_eos` holds the requests' `min_new_tokens`; None where all are 0.
    """

    def make_sampling_inputs(self, seqs: list[Any]) -> FocusSamplingInputs:
        """Parameters of `seqs`, one row each."""
        inputs = super().make_sampling_inputs(seqs)
        # the stop words of a request with min_new_tokens are banned by position, not for the whole block
        inputs.bad_words, inputs.bad_mask = _pad_lists([seq.sampling_param.bad_words for seq in seqs])
        minimums = [seq.sampling_param.min_new_tokens for seq in seqs]
        inputs.num_ignore_eos = torch.tensor(minimums) if any(minimums) else None
        unusual = tuple(index for index, seq in enumerate(seqs) if is_unusual(seq.sampling_param))
        return FocusSamplingInputs(**vars(inputs), unusual=unusual)


def _pad_lists(words: list[list[int]]) -> tuple[Tensor | None, Tensor | None]:
    """Token lists as [S, W] int64, -1 beyond the end, and their validity; None, None where all are empty."""
    width = max(map(len, words))
    if width == 0:
        return None, None
    table = torch.tensor([list(row) + [-1] * (width - len(row)) for row in words])
    return table, table >= 0


@dataclass(frozen=True)
class Draw:
    """A way to draw tokens that a CUDA graph can hold, and its name."""
    name: str
    sampler: Sampler


class Samplers:
    """Draws on the device, greedy or by temperature, top-k, top-p, min-p and seed, from buffers of fixed addresses.

    Args:
        kernels: of :func:`lmdeploy_focus.kernels.dispatch.kernels_for`.
        state: of the sequences; has each one's place in its random stream.
        mask_token: never drawn.
    """

    def __init__(self, kernels: Any, state: FocusState, mask_token: int) -> None:
        self._kernels, self._state, self._mask_token = kernels, state, mask_token
        sequences, device = state.table.size(0), state.table.device
        self._neutral = {'temperature': 1.0, 'top_k': 1, 'top_p': 1.0, 'min_p': 0.0, 'random_seeds': 0}
        self._parameters = {name: torch.full((sequences,), value, device=device)
                            for name, value in self._neutral.items()}
        self._banned = torch.full((sequences, WORDS), -1, dtype=torch.int64, device=device)
        self._bans = False
        self._draws = {'greedy': Draw('greedy', self._greedy), 'sampled': Draw('sampled', self._sampled)}

    def named(self) -> list[Draw]:
        """All draws, to capture."""
        return list(self._draws.values())

    def take(self, inputs: FocusSamplingInputs) -> Draw:
        """The draw for a step's parameters, one row a running sequence; what it draws for unusual ones is not right."""
        self._take_bans(inputs.bad_words)
        # the most probable token is that at any temperature, but its confidence is not
        if inputs.max_top_k == 1 and inputs.temperature is None:
            return self._draws['greedy']
        for name, buffer in self._parameters.items():
            value = getattr(inputs, name)
            if value is None:
                value = inputs.max_top_k if name == 'top_k' else self._neutral[name]
            buffer[:self._state.count] = value
        self._parameters['top_k'][:self._state.count].clamp_(1, LARGEST_TOP_K)  # of unusual ones
        return self._draws['sampled']

    def _take_bans(self, words: Tensor | None) -> None:
        """The banned tokens [S, W], -1 beyond a row's last; more than there is room for are an unusual sequence's."""
        if words is not None or self._bans:
            self._banned.fill_(-1)
        self._bans = words is not None
        if words is not None:
            words = words[:, :WORDS]
            self._banned[:self._state.count, :words.size(1)] = words

    def _ban(self, logits: Tensor, sequence: Tensor) -> None:
        """Take the banned tokens of each row's sequence out of logits [R, V]; the mask token stands for none."""
        words = self._banned[sequence]
        logits.scatter_(1, torch.where(words >= 0, words, self._mask_token), float('-inf'))

    def _greedy(self, logits: Tensor, real: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self._ban(logits, sequence)
        return self._kernels.greedy_head(logits, self._mask_token, real)

    def _sampled(self, logits: Tensor, real: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self._ban(logits, sequence)
        length = self._state.length
        offset = state_columns(self._state.table, length).random_offset
        temperature, top_k, top_p, min_p, seeds = self._parameters.values()
        return self._kernels.sampled_head(logits, self._mask_token, real, sequence, position, temperature, top_k, top_p,
                                          min_p, seeds, offset, length)


def expand_rows(inputs: SamplingInputs, sequence: Tensor, position: Tensor, state: SimpleNamespace,
                block_length: int) -> SamplingInputs:
    """The parameters of R sampled rows, for LMDeploy's processors.

    Args:
        inputs: of S sequences.
        sequence, position: [R] int64, sequence and block position of each row.
        state: columns of the S sequences' state.
        block_length: L.
    """
    rows = {f.name: getattr(inputs, f.name)[sequence]
            for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)}
    # a row's own place in the random stream: neighbours in a block must not draw the same number
    rows['random_offsets'] = state.random_offset[sequence] * block_length + position
    place = (state.history - state.output_start)[sequence] + position
    rows['num_ignore_eos'] = rows.get('num_ignore_eos', 0) - place
    processors: list[Any] = [None] * sequence.numel()
    if any(inputs.logits_processors):  # only then does the host need to know whose row each is
        processors = [inputs.logits_processors[index] for index in sequence.tolist()]
    return replace(inputs, batch_size=sequence.numel(), logits_processors=processors, response_formats=(),
                   session_ctx=None, session_to_cleanup=None, generated_ids_cpu=None, **rows)
