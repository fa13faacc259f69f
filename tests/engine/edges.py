"""Two runners of the demo model on copies of everything, and batches of just as many rows as a bucket holds."""
import random
from bisect import bisect_left
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace

import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy_focus.kernels.layout import TURNS, report_columns, state_columns

from lmdeploy_focus.engine.graph_runner import LONGEST_PREFILL, GraphRunner
from lmdeploy_focus.engine.pace import Pacer
from lmdeploy_focus.engine.sampling import Samplers
from lmdeploy_focus.stages.state import FocusState, first_rows

COLUMNS, STEPS = 4, 3
# whether steps evict, and what is other than the engine's options
KINDS = {'focus': (True, {}), 'everything is kept': (True, {'keep': 64}), 'nothing is ranked': (False, {})}


def on_stream(agent):
    """The agent's own stream, where it has one: graphs are not captured on the default stream."""
    return torch.cuda.stream(agent.stream) if agent.device == 'cuda' else nullcontext()


def on_buffers(agent):
    """A runner of an engine's own state and caches on fixed buffers, without graphs; also on a CPU."""
    plain, config = agent._build_runner(), agent.cache_engine.cache_config
    columns = config.num_gpu_blocks * (config.block_size // plain.options.page_size)
    return GraphRunner(plain.model, plain.options, plain.evicting, plain.state, columns,
                       columns * plain.options.page_size, graphs=False)


class Side:
    """A runner with a state, caches and sampling parameters of its own."""

    def __init__(self, agent, kind, sequences, graphs):
        plain = agent.runner
        evicting, changed = kind
        self.state = FocusState(sequences, plain.state.length, plain.state.table.device)
        pages = min(sequences * COLUMNS, plain.model.caches[0][0].size(0))
        self.caches = [tuple(torch.zeros_like(half[:pages]) for half in cache) for cache in plain.model.caches]
        self.runner = GraphRunner(replace(plain.model, caches=self.caches), replace(plain.options, **changed), evicting,
                                  self.state, COLUMNS, COLUMNS * plain.options.page_size, graphs)
        self.samplers = Samplers(plain.model.kernels, self.state, plain.options.mask_token)
        if graphs:
            self.runner.capture(self.samplers.named(), lambda done, number: None)
            assert self.runner.captured
        self.state.clear()

    def litter(self):
        """Fill the runner's buffers with what some other step may have left there."""
        for rows in (self.runner.view.entered, self.runner.view.plan):
            for field in fields(rows):
                getattr(rows, field.name).fill_(1)
        self.runner.view.report.fill_(1)
        self.runner.view.page_table.fill_(1)
        self.runner.view.stop_words.fill_(1)
        for buffer in (*(vars(self.runner._entered) if self.runner._entered else {}).values(), self.runner._hidden):
            if isinstance(buffer, torch.Tensor):
                buffer.fill_(float('nan'))

    def begin(self, rows, caches):
        """Take a batch and KV."""
        self.state.clear()
        self.state.append(rows)
        for mine, its in zip(self.caches, caches, strict=True):
            for half, other in zip(mine, its, strict=True):
                half.copy_(other)

    def step(self, page_table, stop_words, parameters):
        """One step; what it leaves."""
        runner = self.runner
        runner.forward(page_table, stop_words)
        draw = self.samplers.take(parameters)
        report = runner.decide(draw)
        kept = runner.view.rows_kept()
        if self.state.table.is_cuda:
            torch.cuda.synchronize()
        turn = int(runner.view.pace.turn)
        return {'report': report.clone(), 'state': self.state.table.clone(), 'hidden': runner._hidden[:kept].clone(),
                'current': runner.view.plan.current.clone(), 'pending': runner.view.plan.pending.clone(),
                'totals': runner.view.pace.totals[(turn - 1) % TURNS].clone(), 'turn': torch.tensor(turn)}


class Pair:
    """The eager step, and the same in graphs; on a CPU, the same on littered buffers."""

    def __init__(self, agent, kind, sequences):
        self.sequences = sequences
        cuda = agent.device == 'cuda'
        one, other = Side(agent, kind, sequences, False), Side(agent, kind, sequences, cuda)
        self.one, self.other, self.eager = one, other, one.runner
        self.length, self.device = one.state.length, one.state.table.device
        self.options = agent.runner.options
        generator = torch.Generator(self.device).manual_seed(1)
        self.caches = [tuple(torch.randn(half.shape, generator=generator, device=self.device).to(half.dtype)
                             for half in cache) for cache in one.caches]
        self.pages = torch.randperm(len(one.caches[0][0]), generator=torch.Generator().manual_seed(2))
        self.pages = self.pages.view(-1, COLUMNS).to(self.device)

    def run_all(self, monkeypatch, every):
        """Every edge of every so-manieth bucket; what happened, counted."""
        seen = Counter()
        for bucket in self.eager.buckets[every - 1::every]:
            most = 2 * self.length * self.sequences
            for rows, room in ((bucket - 1, bucket), (bucket, bucket), (bucket + 1, bucket), (bucket + 1, bucket + 1)):
                if rows > most or room > self.eager.largest:
                    room = rows = min(bucket, most)  # beyond the largest batch there are no rows
                self._edge(monkeypatch, rows, room, seen)
        return seen

    def _edge(self, monkeypatch, rows, room, seen):
        own = random.Random(rows * 7919 + room)
        batch, sampled = self._batch(rows, own)
        wanted = room, room, max(1, sampled + room - rows)
        monkeypatch.setattr(Pacer, 'predict', lambda self, count, evicting: self._learn() or wanted)
        words = torch.tensor([[own.randrange(4096), -1] for _ in range(len(batch))], device=self.device)
        for side in (self.one, self.other):
            side.begin(batch, self.caches)
        seen['cases'] += 1
        for step in range(STEPS):
            parameters = self._parameters(len(batch), hot=(rows + step) % 3 == 0)
            self.other.litter()
            told = [side.step(self.pages[:len(batch)], words, parameters) for side in (self.one, self.other)]
            assert self.eager._rows == self.other.runner._rows
            if step == 0:
                # the rows there are, and the bucket for them
                assert int(told[0]['totals'][0]) == rows
                buckets = self.eager.buckets
                assert self.eager._rows[0] == buckets[bisect_left(buckets, room)]
            for name, value in told[0].items():
                same = torch.equal(value, told[1][name])
                assert same, f'{name}: {rows} rows in {self.eager._rows}, step {step}'
            report = report_columns(told[0]['report'], self.length)
            seen['waited'] += int(told[0]['totals'][3])
            seen['stopped'] += int(report.stopped.sum())
            seen['rolled'] += int(((report.masked == 0) & (report.stopped == 0) & (report.ran == 1)).sum())
        self._same_caches((rows, room))

    def _same_caches(self, what):
        for layer, (mine, its) in enumerate(zip(self.one.caches, self.other.caches, strict=True)):
            for half, other in zip(mine, its, strict=True):
                assert torch.equal(half, other), f'KV of layer {layer}: {what}'

    def _batch(self, rows, own):
        """State of sequences with just so many rows in all, and how many of them are masked.

        As many sequences as there may be with so few rows; those of finished blocks only where there are more rows than
        positions, or now and then."""
        length, most = self.length, self.sequences * self.length
        current = rows if rows <= most // 2 and own.random() < 0.6 else min(most, rows - rows // own.choice([3, 5, 9]))
        count = own.randint(-(-max(current, rows - current) // length), min(self.sequences, current))
        own_rows, pending = _parts(current, count, length, 1, own), _parts(rows - current, count, length, 0, own)
        options, table = self.options, []
        for mine, before in zip(own_rows, pending, strict=True):
            entering, waiting = own.sample(range(length), mine), own.sample(range(length), before)
            ids = torch.tensor([[options.mask_token if p in entering else own.randrange(5, 4000)
                                 for p in range(length)]])
            masked = torch.tensor([[p in entering for p in range(length)]])
            history = length * own.randint(1 if before else 0, 2)
            one = torch.ones(1, dtype=torch.int64)
            row = first_rows(ids, masked, one * history, one * own.randint(1, 3 * length), one * history,
                             one * own.randint(0, 1000), 1.5, own.choice([1e-6, 1e-3, .8]))
            state = state_columns(row, length)
            state.uncached.fill_(_bits(entering))
            state.pending.fill_(_bits(waiting))
            state.pending_ids.copy_(torch.tensor([[own.randrange(5, 4000) for _ in range(length)]]))
            done = [p for p in range(length) if p not in entering]
            state.progress.fill_(max(done, default=-1))
            state.decoded.fill_(len(done))
            state.steps.fill_((len(done) + 1) // 2)
            table.append(row)
        return torch.cat(table).to(self.device), current

    def _parameters(self, count, hot):
        if not hot:
            return SamplingInputs(max_top_k=1, logits_processors=[None] * count)
        index = torch.arange(count, device=self.device)
        return SamplingInputs(temperature=.5 + index / 50, top_k=index % 3 * 7 + 1, top_p=1 - index / 400,
                              random_seeds=index + 5, max_top_k=15, logits_processors=[None] * count)

    def prefill_all(self, every):
        """Prompts of whole blocks around every so-manieth bucket, and of more rows than a step may have; the number of
        rows of each batch that went through the runners."""
        most, done = min(LONGEST_PREFILL // self.length, self.sequences * 4), []
        edges = {bucket // self.length for bucket in self.eager.buckets[every - 1::every]}
        for number in sorted({most, *(edge + more for edge in edges for more in (-1, 0, 1))}):
            if not 0 < number <= most:
                continue
            own = random.Random(number)
            count = own.randint(-(-number // 4), min(self.sequences, number))
            lengths = torch.tensor(_parts(number, count, 4, 1, own), device=self.device) * self.length
            history = torch.tensor([own.randrange(3) for _ in range(count)], device=self.device) * self.length
            ids = torch.tensor([own.randrange(5, 4000) for _ in range(number * self.length)], device=self.device)
            taken = []
            for side in (self.one, self.other):
                side.begin(side.state.table[:0], self.caches)
                taken.append(side.runner.prefill(ids, lengths, history, self.pages[:count]))
            assert taken[0] == taken[1]
            self._same_caches(number)
            if taken[0]:
                assert not torch.equal(self.one.caches[-1][0], self.caches[-1][0])
                done.append(number * self.length)
        return done


def _bits(positions):
    """A map of positions as int64."""
    value = sum(1 << p for p in positions)
    return value - (1 << 64) if value >= 1 << 63 else value


def _parts(total, count, most, least, own):
    """`count` numbers from `least` to `most` that sum to `total`."""
    parts = [least] * count
    left = total - least * count
    while left:
        place = own.randrange(count)
        more = min(own.randint(1, left), most - parts[place])
        parts[place] += more
        left -= more
    return parts
