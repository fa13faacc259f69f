"""A recording on the device, and the two engines' ways into it.

A block's place in a recording is one number, the index of a step among all recorded steps. Which recorded block a block
follows is as good as random, but fixed by seed and state. Letters: S sequences, L block length, R sampled rows.
"""
from typing import Any

import numpy as np
import torch
from lmdeploy_focus.kernels.layout import FIELDS, Plan, Rows
from torch import Tensor

from .traces import Recording

# draws of a recorded block for each number of masked positions that a block may begin with; a power of two
SLOTS = 1 << 14
# of a block's history, appendable and output_start: sums of multiples that wrap around spread over all slots
_KEYS = {'history': 0x9E3779B97F4A7C15, 'appendable': 0xC2B2AE3D27D4EB4F, 'output_start': 0x165667B19E3779F9}
_SHIFT = 43


class Tables:
    """A recording as tensors.

    Attributes:
        length: L.
        first: [L + 1, SLOTS] int64, first step of the recorded block that a draw means, by masked positions.
        hits: [steps + 2 L, L] bool, positions that each step decodes; those beyond the last step decode all.
        deltas: [steps + 2 L, L] float32, importance delta of the j-th masked position.
    """

    def __init__(self, recording: Recording, device: torch.device | str, seed: int = 0):
        length = recording.length
        self.length = length
        rng = np.random.default_rng(seed)
        starts = recording.first[:-1]
        first = np.zeros((length + 1, SLOTS), np.int64)
        for waiting in range(1, length + 1):
            blocks = starts[recording.waiting == waiting]
            if len(blocks) == 0:
                raise ValueError(f'--trace: no recorded block begins with {waiting} masked positions')
            first[waiting] = rng.permutation(np.resize(rng.permutation(blocks), SLOTS))
        place = np.arange(length, dtype=np.uint64)
        hits = np.ones((len(recording.decoded) + 2 * length, length), bool)
        hits[:len(recording.decoded)] = recording.decoded[:, None] >> place & np.uint64(1)
        deltas = np.zeros(hits.shape, np.float32)
        deltas[:len(recording.decoded)] = recording.deltas()
        self.first, self.hits, self.deltas = (torch.as_tensor(value).to(device) for value in (first, hits, deltas))


class EngineReplay:
    """The focus engine's replay, with eviction or without (:class:`lmdeploy_focus.stages.replay.Replay`).

    The step in a block is the state's `steps`: every recorded step decodes a token. Kept rows are those recorded,
    because the real selection sees the recorded deltas. Ten launches and three.
    """

    def __init__(self, tables: Tables, heads: int, sequences: int):
        """For a model of `heads` key heads and at most `sequences` sequences."""
        length, device = tables.length, tables.hits.device
        columns = slice(FIELDS.index('history'), FIELDS.index('output_start') + 1)
        self.columns = slice(2 * length + columns.start, 2 * length + columns.stop)
        factors = [_KEYS.get(name, 0) for name in FIELDS[columns]]
        self.factors = torch.tensor(np.array(factors, np.uint64).view(np.int64), device=device)
        self.place = {name: 2 * length + FIELDS.index(name) for name in ('history', 'output_start', 'steps')}
        self.length = length
        # a whole block comes first: others have negative places, which index from the end
        self.first = torch.cat([tables.first[length:], tables.first[1:length]]).flatten()
        self.scores = tables.hits * 2.0
        self.later = torch.zeros((len(tables.deltas), heads, length), device=device)
        self.later[:, 0] = tables.deltas
        self.earlier = torch.zeros((sequences, heads, length), device=device)
        self.step = torch.zeros(sequences, dtype=torch.int64, device=device)

    def importances(self, table: Tensor, entered: Rows, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`lmdeploy_focus.stages.replay.Replay`; finds the place in the recording for both methods.

        Raises:
            ValueError: the batch or the model is not what this was made for.
        """
        sequences = table.size(0)
        if sequences > len(self.step):
            raise ValueError(f'the replay has room for {len(self.step)} sequences, and there are {sequences}')
        slot = (table[:, self.columns] * self.factors).sum(1).bitwise_right_shift(_SHIFT).bitwise_and(SLOTS - 1)
        # positions of the prompt in the block have no mask to begin with
        missing = (table[:, self.place['history']] - table[:, self.place['output_start']]).clamp(1 - self.length, 0)
        begun = self.first[torch.add(slot, missing, alpha=SLOTS)]
        step = torch.add(begun, table[:, self.place['steps']], out=self.step[:sequences])
        if second.size(1) == 1:  # a step that keeps everything ranks nothing
            return first, second
        return self.earlier[:sequences], self.later[step]

    def decisions(self, table: Tensor, plan: Plan, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`lmdeploy_focus.stages.replay.Replay`."""
        rows, sequences = tokens.size(0), table.size(0)
        # what lies beyond the sampled rows may be of an earlier, larger batch
        sequence = plan.sampled_sequence[:rows].clamp_max(sequences - 1)
        return tokens, self.scores[self.step[:sequences]][sequence, plan.sampled_position[:rows]]


class StockReplay:
    """Stock LMDeploy's replay, in the place of `UnmaskingProcessor.low_confidence_dynamic`.

    That method knows a block's mask and token ids alone, so a decoded position holds a code as its token: that of the
    block's next step. Codes of first steps come before all others, so that the largest in a block is its place.
    """

    def __init__(self, tables: Tables, code: int, masked: int, unmasked: int, seed: int = 0):
        """Codes are token ids from `code` on; prompts must stay below. `masked` and `unmasked` are LMDeploy's marks.

        Raises:
            ValueError: masked is not 0, which the arithmetic relies on.
        """
        if masked != 0:
            raise ValueError(f'DLLM_MASKED={masked}: expected 0')
        self.code, self.unmasked, self.length = code, unmasked, tables.length
        count, device = len(tables.hits), tables.hits.device
        begins = torch.unique(tables.first[1:])
        other = torch.ones(count, dtype=torch.bool, device=device)
        other[begins] = False
        order = torch.cat([begins, other.nonzero()[:, 0]])  # step of each code
        codes = torch.empty_like(order).scatter(0, order, torch.arange(count, device=device))
        self.codes = count
        self.first = (codes[tables.first] + code).flatten()
        self.hits = torch.zeros((code + count, tables.length), dtype=torch.bool, device=device)
        self.hits[code:] = tables.hits[order]
        self.next = torch.zeros(code + count, dtype=torch.int64, device=device)
        self.next[code:] = codes[(order + 1).clamp_max(count - 1)] + code
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def unmask(self, processor: Any, logits: Tensor, token_ids: Tensor, dllm_mask: Tensor) -> Tensor:
        """Stock's confidences, which cost what they cost, and then the recorded decisions: 13 small launches for 8.

        Args:
            processor: LMDeploy's.
            logits: [S * L, V].
            token_ids: [S * L] int64, sampled where masked, else as they were; changed in place.
            dllm_mask: [S * L] uint8.

        Returns:
            The mask after the step.
        """
        processor._get_scores(logits, token_ids)
        ids, mask = token_ids.view(-1, self.length), dllm_mask.view(-1, self.length)
        masked = mask == 0
        draw = torch.randint(SLOTS, (len(mask),), device=mask.device, generator=self.generator)
        fresh = self.first[torch.add(draw, masked.sum(1), alpha=SLOTS)]
        code = torch.maximum(ids.masked_fill(masked, 0).amax(1), fresh)
        hit = self.hits[code] & masked
        torch.where(hit, self.next[code][:, None], ids, out=ids)
        mask.masked_fill_(hit, self.unmasked)
        return dllm_mask
