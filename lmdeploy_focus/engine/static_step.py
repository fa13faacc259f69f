"""The decode step on buffers of fixed addresses, in two parts that a CUDA graph can hold.

The prefix runs every position of every block, so its shapes depend on the batch alone; the suffix runs the first N rows
of the plan that the prefix has left, and its shapes depend on a bucket of N. The stages (`lmdeploy_focus/stages`) are
the same step without fixed shapes; a test holds the two against each other.
"""
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference_plan import Plan
from ..stages.decoder import Decoder, KVCache, PackedLayer
from ..stages.state import FocusState, pack_bits, unpack_bits
from ..stages.step import StepOptions
from ..stages.view import MASKED, UNMASKED

# a bucket of rows may reach this far beyond the rows of the batch
SPARE_ROWS = 512


@dataclass
class StepBuffers:
    """What a step reads, at fixed addresses, for at most S sequences. Rows of a padded batch have nothing masked and
    nothing that enters.

    Attributes:
        ids: [S, L] int64. mask: [S, L] uint8. history: [S] int64. page_table: [S, P] int32.
        uncached, progress, decoded, steps: [S] int64, see FocusState. alive: [S] bool.
    """
    ids: Tensor
    mask: Tensor
    history: Tensor
    page_table: Tensor
    uncached: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor
    alive: Tensor

    @classmethod
    def empty(cls, sequences: int, length: int, columns: int, device: torch.device | str) -> 'StepBuffers':
        """Buffers of a batch in which no sequence is alive."""
        shapes = {'ids': (sequences, length), 'mask': (sequences, length), 'page_table': (sequences, columns)}
        dtypes = {'mask': torch.uint8, 'page_table': torch.int32, 'alive': torch.bool}
        return cls(**{f.name: torch.zeros(shapes.get(f.name, (sequences, )), dtype=dtypes.get(f.name, torch.int64),
                                          device=device) for f in fields(cls)})

    def fill(self, ids: Tensor, mask: Tensor, history: Tensor, page_table: Tensor, state: FocusState,
             padded: int) -> None:
        """Take a batch; the sequences up to `padded` beyond it are not alive."""
        count, columns = ids.size(0), min(page_table.size(1), self.page_table.size(1))
        self.ids[:count], self.mask[:count], self.history[:count] = ids, mask, history
        self.page_table[:count, :columns] = page_table[:, :columns]
        for name in ('uncached', 'progress', 'decoded', 'steps'):
            getattr(self, name)[:count] = getattr(state, name)
        self.alive[:count] = True
        self.alive[count:padded] = False


class StaticStep:
    """One decode step of a model on fixed buffers.

    Args:
        decoder: the model, whose layers have `packed` queries (:class:`lmdeploy_focus.models.sdar.SDARLayer`).
        head: hidden states [N, E] -> logits [N, V].
        caches: KV of each layer.
        kernels: of :func:`lmdeploy_focus.kernels.dispatch.kernels_for`.
        options: of the step.
        mask_token: banned from sampling.
        sequences, length, columns: S, L and the columns of the page table.
        max_kv: bound of the keys of a sequence.
    """

    def __init__(self, decoder: Decoder, head: Any, caches: list[KVCache], kernels: Any, options: StepOptions,
                 mask_token: int, sequences: int, length: int, columns: int, max_kv: int) -> None:
        self.decoder, self.head, self.caches, self.kernels = decoder, head, caches, kernels
        self.layers: list[PackedLayer] = list(decoder.layers)  # type: ignore[arg-type]
        self.options, self.mask_token, self.length, self.max_kv = options, mask_token, length, max_kv
        cache = caches[0][0]
        device, self.page_size = cache.device, cache.size(1)
        self.inputs = StepBuffers.empty(sequences, length, columns, device)
        self.plan = _plan_buffers(sequences, length, device)
        self.alpha = torch.full((sequences, ), options.alpha, dtype=torch.float64, device=device)
        self.entering = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.carried: dict[str, Tensor] = {}  # what the suffix takes from the prefix: [S * L, ...] each

    @torch.inference_mode()
    def prefix(self, batch: int, evicting: bool) -> None:
        """Layers 0 and 1 up to the plan, for the first `batch` sequences of the buffers."""
        inputs, length, kernels = self.inputs, self.length, self.kernels
        ids, mask, history = inputs.ids[:batch], inputs.mask[:batch], inputs.history[:batch]
        page_table, progress = inputs.page_table[:batch], inputs.progress[:batch]
        place = torch.arange(length, device=ids.device)
        entering = self._entering(batch)
        position = history[:, None] + place
        pages = page_table.gather(1, (position // self.page_size).clamp_max(page_table.size(1) - 1))
        pages = torch.where(entering, pages, -1).flatten()
        offsets = (position % self.page_size).flatten()
        rightmost = torch.where(entering, place, -1).amax(1)
        kv_len = torch.where(inputs.alive[:batch], history + self._last(rightmost, progress) + 1, 0)
        q_start = torch.arange(0, batch * length + 1, length, device=ids.device)
        masked = (mask == MASKED) & entering
        candidates = self._candidates(masked)

        hidden = self.decoder.embed(ids.flatten()[None])
        cos, sin = self.decoder.rotary(hidden, position.flatten()[None])
        first, second = self.layers[0], self.layers[1]
        query, key, residual = first.packed(hidden, None, (cos, sin), self.caches[0], pages, offsets, kernels, evicting)
        attended = kernels.ragged_attention(query, *self.caches[0], page_table, q_start, kv_len, length, self.max_kv,
                                            first.scale)
        received = self._received(query, key, candidates, first.scale, evicting)
        hidden, residual = first.finish(attended, residual)
        query, key, residual = second.packed(hidden, residual, (cos, sin), self.caches[1], pages, offsets, kernels,
                                             evicting)
        later = self._received(query, key, candidates, second.scale, evicting)
        keep = self.options.keep if evicting else length
        self.entering[:batch] = pack_bits(entering)
        self._plan(batch, received, later, pack_bits(masked), q_start, keep)
        self._close(batch)
        self._carry(query=query, residual=residual[0], cos=cos, sin=sin)

    @torch.inference_mode()
    def suffix(self, batch: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Layer 1's attention and the later layers on the plan's first `rows` rows, of the first `batch` sequences.

        Returns:
            Logits [rows, V] of the plan's sampled rows in order (anything beyond their number), and their greedy tokens
            and confidences, [rows] each.
        """
        plan, kernels, length = self.plan, self.kernels, self.length
        at = plan.rows[:rows].clamp_min(0)
        table, q_start, kv_len = self.inputs.page_table[:batch], plan.q_start[:batch + 1], plan.kv_len[:batch]
        pages, offsets = plan.pages[:rows], plan.offsets[:rows]
        query, residual, cos, sin = (self.carried[name][at] for name in ('query', 'residual', 'cos', 'sin'))
        hidden, residual = residual[None], residual[None]
        for index, (layer, cache) in enumerate(zip(self.layers[1:], self.caches[1:], strict=True)):
            if index > 0:  # layer 1's queries come from the prefix
                query, _, residual = layer.packed(hidden, residual, (cos, sin), cache, pages, offsets, kernels, False)
            attended = kernels.ragged_attention(query, *cache, table, q_start, kv_len, length, self.max_kv, layer.scale)
            hidden, residual = layer.finish(attended, residual)
        hidden = self.decoder.norm(hidden, residual)[0]
        logits = self.head(hidden[plan.sampled[:rows].clamp_min(0)])
        tokens, scores = kernels.greedy_head(logits, self.mask_token, plan.sampled_start[-1:])
        return logits, tokens, scores

    def _entering(self, batch: int) -> Tensor:
        """[batch, L] bool, positions that enter the step (stages/delayed_cache.entering)."""
        inputs = self.inputs
        if self.options.cache == 'off':
            entering = torch.ones((batch, self.length), dtype=torch.bool, device=inputs.ids.device)
        else:
            entering = unpack_bits(inputs.uncached[:batch], self.length)
            whole = ~entering.any(1)
            if self.options.commit == 'full':
                whole = whole | (inputs.mask[:batch] == UNMASKED).all(1)
            entering = entering | whole[:, None]
        return entering & inputs.alive[:batch, None]

    def _last(self, rightmost: Tensor, progress: Tensor) -> Tensor:
        return rightmost if self.options.kv_visible == 'reference' else torch.maximum(rightmost, progress)

    def _candidates(self, masked: Tensor) -> Tensor:
        """[batch, L] int64, row of the j-th masked token, -1 beyond the last."""
        batch = masked.size(0)
        row = torch.arange(batch * self.length, device=masked.device).view(batch, self.length)
        column = torch.where(masked, masked.cumsum(1) - 1, self.length)
        table = torch.full((batch, self.length + 1), -1, device=masked.device)
        return table.scatter(1, column, row)[:, :-1].contiguous()

    def _received(self, query: Tensor, key: Tensor | None, candidates: Tensor, scale: float, evicting: bool) -> Tensor:
        """Partial importance; zeros in a step that keeps everything."""
        if evicting:
            return self.kernels.importance_partial(query, key, candidates, scale)
        heads = self.caches[0][0].size(2)
        return torch.zeros((candidates.size(0), heads, self.length), device=query.device)

    def _plan(self, batch: int, received: Tensor, later: Tensor, masked: Tensor, q_start: Tensor,
              keep: int | None) -> None:
        inputs, options = self.inputs, self.options
        out = Plan(**{f.name: self._part(f.name, batch) for f in fields(Plan)})
        self.kernels.plan(received, later, self.entering[:batch], masked, q_start, inputs.history[:batch],
                          inputs.page_table[:batch], self.page_size, inputs.progress[:batch], inputs.decoded[:batch],
                          inputs.steps[:batch], self.alpha[:batch], keep=keep, selection=options.selection,
                          sequential=options.sequential, kv_visible=options.kv_visible, out=out)
        # the rows of a dense prefix are s * L + position, not the n-th entered row
        rows = self.plan.rows[:batch * self.length]
        rows.copy_(torch.where(rows >= 0, out.sequence * self.length + out.position, -1))

    def _close(self, batch: int) -> None:
        """Empty what lies beyond a batch, which a larger batch may have left: the suffix may run on more of it."""
        plan, rows = self.plan, batch * self.length
        plan.q_start[batch + 1:] = plan.q_start[batch]
        plan.sampled_start[batch + 1:] = plan.sampled_start[batch]
        plan.kv_len[batch:] = 0
        plan.pages[rows:rows + SPARE_ROWS] = -1

    def _part(self, name: str, batch: int) -> Tensor:
        """The plan's buffer `name` for a batch."""
        whole = getattr(self.plan, name)
        if name == 'total':
            return whole
        if name in ('q_start', 'sampled_start'):
            return whole[:batch + 1]
        return whole[:batch] if name in ('kept', 'kv_len', 'rightmost', 'candidates') else whole[:batch * self.length]

    def _carry(self, **tensors: Tensor) -> None:
        for name, value in tensors.items():
            if name not in self.carried:
                self.carried[name] = value.new_empty((self.inputs.ids.numel(), *value.shape[1:]))
            self.carried[name][:value.size(0)] = value


def _plan_buffers(sequences: int, length: int, device: torch.device) -> Plan:
    """A plan with spare rows; its total lies where the host sees it without a copy."""
    plan = Plan.empty(sequences, length, device)
    for f in fields(Plan):
        value = getattr(plan, f.name)
        if value.shape == (sequences * length, ):
            setattr(plan, f.name, value.new_zeros(sequences * length + SPARE_ROWS))
        else:
            value.zero_()
    plan.total = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == 'cuda')
    return plan
