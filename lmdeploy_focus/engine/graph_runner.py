"""Runs the decode step on a GPU: a prefix graph for each size of batch, a suffix graph for each number of rows."""
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from ..stages.state import FocusState, unpack_bits
from .static_step import SPARE_ROWS, StaticStep


def batch_buckets(largest: int) -> list[int]:
    """Sizes of batch to capture: fine where a padded sequence costs most."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, largest, 32)}
    return sorted({size for size in sizes if size < largest} | {largest})


def row_buckets(largest: int) -> list[int]:
    """Numbers of rows to capture: at most 6% of a bucket is padding from 128 rows on."""
    steps = ((8, 64), (16, 256), (64, 1024), (256, 4096), (SPARE_ROWS, largest))
    buckets, size = [], 0
    for step, limit in steps:
        while size < min(limit, largest):
            size += step
            buckets.append(size)
    return buckets


class FocusGraphRunner:
    """The step's two parts, replayed; with `graphs=False` they run as they are.

    Args:
        step: the step on fixed buffers.
        evicting: whether steps may evict.
        graphs: capture and replay; otherwise every call launches its kernels.
    """

    def __init__(self, step: StaticStep, evicting: bool, graphs: bool) -> None:
        self.step, self.evicting, self.graphs = step, evicting, graphs
        sequences, length = step.inputs.ids.shape
        self.batches, self.rows = batch_buckets(sequences), row_buckets(sequences * length)
        self._prefix: dict[int, torch.cuda.CUDAGraph] = {}
        self._suffix: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor]]] = {}
        self._pool: Any = None
        self._done: torch.cuda.Event | None = None
        self._batch = 0

    def begin(self, ids: Tensor, mask: Tensor, history: Tensor, page_table: Tensor, state: FocusState) -> None:
        """Take a batch and start its prefix; see :class:`StepBuffers` for shapes."""
        count = ids.size(0)
        self._batch, self._count = self.batches[bisect_left(self.batches, count)], count
        self.step.inputs.fill(ids, mask, history, page_table, state, self._batch)
        if self._batch in self._prefix:
            self._prefix[self._batch].replay()
        else:
            self.step.prefix(self._batch, self.evicting)
        if ids.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def rows_kept(self) -> int | None:
        """N of the batch, None while the prefix is still running."""
        if self._done is not None and not self._done.query():
            return None
        return int(self.step.plan.total)

    def finish(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the suffix on N rows; see :meth:`StaticStep.suffix`. The tensors are overwritten by the next step."""
        bucket = self.rows[bisect_left(self.rows, rows)]
        if bucket in self._suffix:
            graph, outputs = self._suffix[bucket]
            graph.replay()
            return outputs
        return self.step.suffix(self._sequences(bucket), bucket)

    def rows_per_sequence(self) -> tuple[Tensor, Tensor]:
        """[S] int64 each, rows before and after eviction; new tensors."""
        step, plan = self.step, self.step.plan
        entered = unpack_bits(step.entering[:self._count], step.length).sum(1)
        return entered, plan.q_start[1:self._count + 1] - plan.q_start[:self._count]

    def rightmost(self) -> Tensor:
        """[S] int64, largest block position that ran all layers."""
        return self.step.plan.rightmost[:self._count]

    def sampled(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sequence and block position of the sampled rows, [bucket of N] int64 each, -1 beyond the last."""
        plan = self.step.plan
        at = plan.sampled[:self.rows[bisect_left(self.rows, rows)]]
        index = at.clamp_min(0)
        return torch.where(at >= 0, plan.sequence[index], -1), torch.where(at >= 0, plan.position[index], -1)

    def capture(self, progress: Any = None) -> None:
        """Capture all graphs, the largest first, so that the smaller ones find their memory in its pool.

        Args:
            progress: called with the number of graphs done and the number of all.
        """
        if not self.graphs:
            return
        total, done = len(self.batches) + len(self.rows), 0
        self._pool = torch.cuda.graph_pool_handle()
        for batch in reversed(self.batches):
            self._prefix[batch], _ = self._record(lambda b=batch: self.step.prefix(b, self.evicting))
            done += 1
            if progress is not None:
                progress(done, total)
        for rows in reversed(self.rows):
            self._suffix[rows] = self._record(lambda r=rows: self.step.suffix(self._sequences(r), r))
            done += 1
            if progress is not None:
                progress(done, total)

    def _sequences(self, rows: int) -> int:
        """Sequences that N rows can belong to: each has at least one."""
        return min(rows, self.step.inputs.ids.size(0))

    def _record(self, function: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        function()  # compiles kernels and makes what libraries allocate once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            outputs = function()
        return graph, outputs
