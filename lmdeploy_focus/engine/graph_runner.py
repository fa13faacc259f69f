"""Runs decode steps in CUDA graphs captured for numbers of rows, and learns no number of rows from the device."""
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..stages import prefill, step
from ..stages.decoder import Model
from ..stages.state import FocusState
from ..stages.step_options import StepOptions
from ..stages.suffix import Kept
from ..stages.view import FocusView
from .pace import Pacer
from .policy import Costs, Mode, Policy
from .sampling import Draw
from .step_runner import StepRunner

# Largest bucket whose time is measured: beyond it a row costs what it computes, and fewer are always better.
_LARGEST_MEASURED, _REPEATS = 1024, 3
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


class GraphRunner(StepRunner):
    """Runs steps on buffers of fixed addresses; with `graphs=False` every part launches its kernels.

    Args:
        columns: pages of a sequence, at most.
        max_kv: bound of a sequence's keys.
        graphs: capture and replay.
        policy: chooses between evicting and dense steps, once :attr:`costs` are known; None keeps to `evicting`.

    Attributes:
        costs: of the buckets, by :meth:`measure`; None chooses nothing.
    """

    def __init__(self, model: Model, options: StepOptions, evicting: bool, state: FocusState, columns: int,
                 max_kv: int, graphs: bool, policy: Policy | None = None) -> None:
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
        self._policy = policy
        self.costs: Costs | None = None
        self._mode: Mode | None = None if policy is None else policy.first
        self._joined = False

    @property
    def dense(self) -> bool:
        """See :attr:`StepRunner.dense`."""
        return not (self.evicting if self._mode is None else self._mode.evicting)

    @property
    def deferred(self) -> int:
        """Sequence-steps that had to wait so far."""
        return self._pacer.deferred

    def join(self, sequences: int) -> None:
        """Sequences that take part from the next step on."""
        self._pacer.join(sequences)
        self._joined |= sequences > 0

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
        self._make_room(self._choose(count))
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
        self._pacer.launch(self.state.count, done, not self.dense)
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

    @torch.inference_mode()
    def measure(self) -> Tensor:
        """Time the captured parts of a step: [3, buckets] float32 milliseconds on the device, see :class:`Costs`."""
        buckets = self.measured_buckets()
        table = torch.zeros((3, len(buckets)), device=self.state.table.device)
        draw = next(key[2] for key in self._graphs if key[0] == 'head')
        for column, rows in enumerate(buckets):
            for line, key in enumerate((('prefix', rows), ('suffix', rows), ('head', rows, draw))):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._graphs[key].replay()
                start.record()
                for _ in range(_REPEATS):
                    self._graphs[key].replay()
                end.record()
                end.synchronize()
                table[line, column] = start.elapsed_time(end) / _REPEATS
        self.view.pace.turn.zero_()
        return table

    def measured_buckets(self) -> list[int]:
        """Numbers of rows that :meth:`measure` times."""
        return [rows for rows in self.buckets if rows <= _LARGEST_MEASURED]

    def _choose(self, count: int) -> tuple[int, int, int]:
        """The step's mode, written to its sequences, and its buckets."""
        rows = self._round(self._pacer.predict(count, self.evicting))
        if self._policy is None or self.costs is None or not count:
            return rows
        dense = self._round(self._pacer.predict(count, False))
        mode = self._policy.choose(self.costs.of(rows), self.costs.of(dense))
        if mode is not self._mode or (self._joined and mode is not self._policy.first):
            self.state.decide_by(mode.alpha, mode.threshold)
        self._mode, self._joined = mode, False
        return rows if mode.evicting else dense

    def _round(self, rows: tuple[int, int, int]) -> tuple[int, int, int]:
        """The buckets of so many rows entering, kept and sampled."""
        enter, keep, draw = (self.buckets[bisect_left(self.buckets, number)] for number in rows)
        return enter, keep, draw

    def _make_room(self, chosen: tuple[int, int, int]) -> None:
        """Tell the device the step's buckets."""
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
