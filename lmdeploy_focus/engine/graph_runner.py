"""Runs decode steps: on a GPU in CUDA graphs captured for numbers of rows, on a CPU for exactly the rows there are."""
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import Pace, Plan, Rows
from ..stages import prefill, step, unmask
from ..stages.decoder import Model
from ..stages.state import FocusState
from ..stages.step_options import StepOptions
from ..stages.suffix import Kept
from ..stages.view import STOP_WORDS, FocusView
from .pace import Pacer
from .sampling import Draw

# Rows of a prefill that runs in a graph. Launching its kernels one by one takes the host some 40 ms, as long as an H200
# is busy with this many; longer ones are LMDeploy's own.
LONGEST_PREFILL = 2048


def row_buckets(largest: int) -> list[int]:
    """Numbers of rows to capture: fine where steps of many sequences are, coarse beyond."""
    buckets, size = [], 0
    for spacing, limit in ((8, 64), (16, 512), (32, 1536), (128, 3072), (512, largest)):
        while size < min(limit, largest):
            size += spacing
            buckets.append(size)
    return buckets


class StepRunner:
    """Runs steps whose row counts the host reads: for a CPU, where that costs nothing.

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
            none = self.state.table.new_empty(0)
            return self.settle(none, none.float())
        return step.decide(self.model, self.view, self.options, self._hidden, self.view.rows_sampled(), draw.sampler)

    @torch.inference_mode()
    def logits(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Logits [R, V] of the sampled rows, their sequences and block positions [R], for :meth:`settle`; None where
        no sequence runs."""
        assert self.view.plan is not None
        if self._hidden is None:
            return None
        rows, plan = self._rows_sampled(), self.view.plan
        return (unmask.logits(self.model, self.view, self._hidden, 0, rows), plan.sampled_sequence[:rows],
                plan.sampled_position[:rows])

    @torch.inference_mode()
    def settle(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """What follows of tokens and confidences [R] that were drawn elsewhere: the step's report."""
        return unmask.settle(self.model, self.view, self.options, tokens, scores)

    def _rows_sampled(self) -> int:
        return self.view.rows_sampled()


class GraphRunner(StepRunner):
    """Runs steps on buffers of fixed addresses; with `graphs=False` every part launches its kernels.

    Args:
        columns: pages of a sequence, at most.
        max_kv: bound of a sequence's keys.
        graphs: capture and replay.
    """

    def __init__(self, model: Model, options: StepOptions, evicting: bool, state: FocusState, columns: int,
                 max_kv: int, graphs: bool) -> None:
        super().__init__(model, options, evicting, state)
        sequences = state.table.size(0)
        self.largest = row_buckets(sequences * state.length + 2 * state.length)[-1]
        self.buckets, self.prompt_buckets = row_buckets(self.largest), row_buckets(LONGEST_PREFILL)
        self.graphs, self.captured = graphs, False
        self._view = FocusView.fixed(state, columns, max_kv, self.largest, options.splits)
        self._prompts = FocusView.fixed(state, columns, max_kv, LONGEST_PREFILL, options.splits)
        self._pacer = Pacer(self.view.pace, state.length, self.largest, evicting)
        self._entered: Kept | None = None
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._rows = (0, 0, 0)

    @property
    def deferred(self) -> int:
        """Sequence-steps that had to wait so far."""
        return self._pacer.deferred

    def join(self, sequences: int) -> None:
        """Sequences that take part from the next step on."""
        self._pacer.join(sequences)

    @torch.inference_mode()
    def forward(self, page_table: Tensor, stop_words: Tensor | None) -> None:
        """See :meth:`StepRunner.forward`; the host learns nothing of the step."""
        view, count = self.view, self.state.count
        columns = min(page_table.size(1), view.page_table.size(1))
        view.page_table[:count, :columns] = page_table[:, :columns]
        if stop_words is None:
            view.stop_words[:count] = -1
        else:
            view.stop_words[:count, stop_words.size(1):] = -1
            view.stop_words[:count, :stop_words.size(1)] = stop_words
        self._make_room(count)
        enter, keep, _ = self._rows
        self._run(('prefix', enter), lambda: self._prefix(enter))
        self._run(('suffix', keep), lambda: self._suffix(keep))

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, seq_length: Tensor, history: Tensor, page_table: Tensor) -> bool:
        """See :meth:`StepRunner.prefill`."""
        view, count = self._prompts, input_ids.size(0)
        if count > LONGEST_PREFILL:
            # row-invariant arithmetic must not depend on how many prompts come together
            return self.options.splits is not None and super().prefill(input_ids, seq_length, history, page_table)
        assert view.entered is not None
        columns = min(page_table.size(1), view.page_table.size(1))
        view.page_table[:seq_length.size(0), :columns] = page_table[:, :columns]
        prefill.list_rows(view.entered, input_ids, seq_length, history, page_table, self.options.page_size,
                          view.length)
        rows = self.prompt_buckets[bisect_left(self.prompt_buckets, count)]
        self._run(('prefill', rows), lambda: prefill.run(self.model, view, rows))
        return True

    @torch.inference_mode()
    def decide(self, draw: Draw) -> Tensor:
        """See :meth:`StepRunner.decide`; the report is overwritten by the next step."""
        rows = self._rows[2]
        self._run(('head', rows, draw.name), lambda: self._head(rows, draw))
        return self._launched()

    @torch.inference_mode()
    def settle(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """See :meth:`StepRunner.settle`; the report is overwritten by the next step."""
        super().settle(tokens, scores)
        return self._launched()

    def _rows_sampled(self) -> int:
        return self._rows[2]

    def _launched(self) -> Tensor:
        """The step is on its way: its report."""
        done = None
        if self.state.table.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._pacer.launch(self.state.count, done)
        assert self.view.report is not None
        return self.view.report[:self.state.count]

    @torch.inference_mode()
    def capture(self, draws: list[Draw], progress: Callable[[int, int], None]) -> None:
        """Capture all graphs, the largest first, so that the smaller ones find their memory in its pool.

        Args:
            draws: each has heads of its own.
            progress: called with the number of graphs done and the number of all.
        """
        if not self.graphs:
            return
        self._pool = torch.cuda.graph_pool_handle()
        parts: list[tuple[tuple[Any, ...], Callable[[], None]]] = []
        for rows in reversed(self.buckets):
            parts.append((('prefix', rows), partial(self._prefix, rows)))
            parts.append((('suffix', rows), partial(self._suffix, rows)))
            parts += [(('head', rows, draw.name), partial(self._head, rows, draw)) for draw in draws]
        parts += [(('prefill', rows), partial(prefill.run, self.model, self._prompts, rows))
                  for rows in reversed(self.prompt_buckets)]
        for done, (key, run) in enumerate(parts, 1):
            self._graphs[key] = self._record(run)
            progress(done, len(parts))
        self.view.pace.turn.zero_()  # warm-up steps were no steps
        self.captured = True

    def _make_room(self, count: int) -> None:
        """Choose the step's buckets and tell the device."""
        enter, keep, draw = (self.buckets[bisect_left(self.buckets, rows)] for rows in self._pacer.predict(count))
        chosen = enter, keep, draw
        if chosen != self._rows:
            self._rows = chosen
            self.view.pace.limits.copy_(torch.tensor(chosen, pin_memory=self.state.table.is_cuda), non_blocking=True)

    def _prefix(self, rows: int) -> None:
        view = self.view
        step.enter(self.model, view, self.options)
        entered = step.rank(self.model, view, self.options, self.evicting, rows)
        if self._entered is None:
            self._entered = entered.room(self.largest)
        self._entered.take(entered)

    def _suffix(self, rows: int) -> None:
        assert self._entered is not None
        hidden = step.denoise(self.model, self.view, step.evict(self.model, self.view, self._entered, rows))
        if self._hidden is None:
            self._hidden = hidden.new_zeros((self.largest, hidden.size(1)))
        self._hidden[:rows] = hidden

    def _head(self, rows: int, draw: Draw) -> None:
        assert self._hidden is not None
        step.decide(self.model, self.view, self.options, self._hidden, rows, draw.sampler)

    def _run(self, key: tuple[Any, ...], run: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            run()
        else:
            graph.replay()

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        run()  # compiles kernels and makes what libraries allocate once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            run()
        return graph
