"""Runs decode steps whose row counts the host reads: for a CPU, where that costs nothing."""
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.layout import Pace, Plan, Rows
from ..stages import prefill, step, unmask
from ..stages.decoder import Model
from ..stages.state import FocusState
from ..stages.step_options import StepOptions
from ..stages.view import STOP_WORDS, FocusView
from .sampling import Draw


class StepRunner:
    """Runs steps of exactly the rows that there are.

    Args:
        model: what to compute with.
        options: of the step.
        evicting: whether steps may evict.
        state: of the running sequences.
    """

    def __init__(self, model: Model, options: StepOptions, evicting: bool, state: FocusState) -> None:
        self.model, self.options, self.evicting, self.state = model, options, evicting, state
        self._pace = Pace.unlimited(state.table.device)
        self._view: FocusView | None = None
        self._hidden: Tensor | None = None

    @property
    def dense(self) -> bool:
        """Whether the step that is running lets every row stay."""
        return not self.evicting

    @property
    def view(self) -> FocusView:
        """The step that is running."""
        assert self._view is not None
        return self._view

    def join(self, sequences: int) -> None:
        """Sequences that take part from the next step on."""

    @torch.inference_mode()
    def forward(self, page_table: Tensor, stop_words: Tensor | None) -> None:
        """Everything up to the final hidden states of the kept rows.

        Args:
            page_table: [S, P] of the running sequences.
            stop_words: [S, W] int64, -1 beyond a row's last; None where there are none.
        """
        state, count = self.state, self.state.count
        words = torch.full((count, STOP_WORDS), -1, device=page_table.device)
        if stop_words is not None:
            words[:, :stop_words.size(1)] = stop_words
        max_kv = page_table.size(1) * self.options.page_size
        self._view = view = FocusView(state.table[:count], page_table, words, self._pace, state.length, max_kv,
                                      self.options.splits)
        step.enter(self.model, view, self.options)
        rows = view.rows_entered()
        if not rows:  # all have stopped; LMDeploy had sent the step before it knew
            view.plan, self._hidden = Plan.empty(count, state.length, 0, page_table.device), None
            return
        entered = step.rank(self.model, view, self.options, self.evicting, rows)
        kept = step.evict(self.model, view, entered, view.rows_kept())
        self._hidden = step.denoise(self.model, view, kept)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, seq_length: Tensor, history: Tensor, page_table: Tensor) -> bool:
        """The KV of prompts; False if they are too long for it. See :func:`lmdeploy_focus.stages.prefill.list_rows`."""
        rows = Rows.empty(seq_length.size(0), self.state.length, input_ids.size(0), input_ids.device)
        prefill.list_rows(rows, input_ids, seq_length, history, page_table, self.options.page_size, self.state.length)
        max_kv = page_table.size(1) * self.options.page_size
        view = FocusView(self.state.table[:0], page_table, self.state.table[:0], self._pace, self.state.length, max_kv,
                         self.options.splits, rows)
        prefill.run(self.model, view, input_ids.size(0))
        return True

    @torch.inference_mode()
    def decide(self, draw: Draw) -> Tensor:
        """Sampling and what follows: the step's report [S, report_width(L)]."""
        if self._hidden is None:
            return self.settle(*self.sample(draw))
        return step.decide(self.model, self.view, self.options, self._hidden, self.view.rows_sampled(), draw.sampler)

    @torch.inference_mode()
    def sample(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 and confidences [R] float32 of the sampled rows, for :meth:`settle`."""
        if self._hidden is None:
            none = self.state.table.new_empty(0)
            return none, none.float()
        return unmask.sample(self.model, self.view, self._hidden, self._rows_sampled(), draw.sampler)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        """Of the sampled rows of some sequences: their indices among all, which are theirs (others pad), logits [U, V],
        sequences and block positions, [U] each; None where no sequence runs."""
        plan = self.view.plan
        assert plan is not None
        if self._hidden is None:
            return None
        at, theirs = unmask.rows_of(self.view, self._rows_sampled(),
                                    torch.tensor(sequences, device=self.state.table.device))
        logits = unmask.logits(self.model, self.view, self._hidden, at)
        return at, theirs, logits, plan.sampled_sequence[at], plan.sampled_position[at]

    @torch.inference_mode()
    def settle(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """What follows of tokens and confidences [R] that were drawn elsewhere: the step's report."""
        return unmask.settle(self.model, self.view, self.options, tokens, scores)

    def _rows_sampled(self) -> int:
        return self.view.rows_sampled()
