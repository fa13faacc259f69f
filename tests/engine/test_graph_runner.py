"""The step on fixed buffers is the step on what there is, with the torch twins and without graphs, on a CPU."""
from dataclasses import replace

import pytest
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy_focus.kernels.layout import report_columns

from lmdeploy_focus.engine.graph_runner import GraphRunner, row_buckets
from lmdeploy_focus.engine.pace import Pacer
from lmdeploy_focus.engine.sampling import Samplers
from lmdeploy_focus.engine.step_runner import StepRunner

from ..stages import tiny_batch
from ..stages.tiny_decoder import MASK_TOKEN

ROOM = 20


class Run:
    """A batch of the tiny decoder in a runner; what each sequence has gone through, in its own time.

    Attributes:
        history: of each sequence, (kept positions, committed ones, report) of every step in which it ran.
        reports: of every step.
        waited: steps in which a sequence had to wait.
        names: of the sequences that run.
    """

    def __init__(self, kind, lives, options, evicting=True, page_size=16, hot=False):
        self.batch = tiny_batch.make(lives, page_size, 14, seed=len(lives), room=ROOM)
        self.state, self.hot = self.batch.state, hot
        options = replace(options, page_size=page_size)
        parts = self.batch.model, options, evicting, self.state
        width = self.batch.page_table.size(1)
        self.runner = (GraphRunner(*parts, columns=width + 3, max_kv=width * page_size, graphs=False)
                       if kind is GraphRunner else StepRunner(*parts))
        self.runner.join(len(lives))
        self.samplers = Samplers(self.batch.model.kernels, self.state, MASK_TOKEN)
        self.names = list(range(len(lives)))
        self.history = [[] for _ in lives]
        self.reports = []
        self.waited = 0

    def step(self, *more, elsewhere=False):
        """One step; `more` stop words [S, W]; `elsewhere`: greedy tokens are drawn from logits, for every other
        sequence at a time, as by LMDeploy's processors.
        """
        index = torch.tensor(self.names)
        alive = self.state.columns.alive.tolist()
        words = torch.cat([self.batch.stop_words[index], *more], 1)
        self.runner.forward(self.batch.page_table[index], words if words.ge(0).any() else None)
        if elsewhere and any(alive):
            tokens, scores = self.runner.sample(self.samplers.take(self.parameters(index)))
            expected, real = tokens, int(self.runner.view.plan.sampled_start[-1])
            tokens = torch.full_like(expected, -1)
            for chosen in ([*range(1, len(self.names), 2)], [*range(0, len(self.names), 2)]):
                rows, theirs, logits, sequence, position = self.runner.logits(chosen)
                assert len(sequence) == len(position) == len(rows) <= len(chosen) * self.state.length
                assert set(sequence[theirs].tolist()) <= set(chosen)
                drawn, _ = self.batch.model.kernels.greedy_head(logits, MASK_TOKEN)
                tokens[rows] = torch.where(theirs, drawn, tokens[rows])
            assert tokens[:real].equal(expected[:real]) and tokens[real:].eq(-1).all()
            report = self.runner.settle(tokens, scores)
        else:
            report = self.runner.decide(self.samplers.take(self.parameters(index)))
        plan = self.runner.view.plan
        self.reports.append(report.clone())
        self.waited += sum(alive) - int(report_columns(report, self.state.length).ran.sum())
        for s, name in enumerate(self.names):
            if report_columns(report, self.state.length).ran[s]:
                assert alive[s]
                self.history[name].append((plan.current[s].item(), plan.pending[s].item(), report[s].tolist()))

    def parameters(self, index):
        """Sampling parameters of the sequences: greedy, or each its own."""
        if not self.hot:
            return SamplingInputs(max_top_k=1, logits_processors=[None] * len(index))
        return SamplingInputs(temperature=.5 + index / 10, top_k=index % 3 * 7 + 1, top_p=1 - index / 40,
                              random_seeds=index + 5, max_top_k=15, logits_processors=[None] * len(index))

    def take(self, keep):
        """Only these of the running sequences stay."""
        self.state.take(torch.tensor(keep, dtype=torch.int64))
        self.names = [self.names[i] for i in keep]


CASES = {
    'focus': {}, 'no neighbour, full commit': {'cache': 'delayed', 'commit': 'full'}, 'no delay': {'cache': 'off'},
    'bottom 2, reference view': {'keep': 2, 'kv_visible': 'reference', 'selection': 'bottom'},
    'random': {'selection': 'random'}, 'sequential': {'strategy': 'sequential', 'tokens_per_step': 2}}


@pytest.fixture
def ample(monkeypatch):
    """Room for every row, in buckets that change from step to step."""
    monkeypatch.setattr(Pacer, 'predict', lambda self, count, evicting: self._learn() or tuple(
        min(2 * count * self.length + 8 * (self.turn * part % 5), self.largest) for part in (1, 2, 3)))


@pytest.mark.parametrize('evicting', [True, False])
@pytest.mark.parametrize('length', [pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize('name', CASES)
def test_whole_decodes(name, length, evicting, ample):
    """To the end of every sequence: the same tokens, kept sets, commits and reports, step for step.

    Red when: a bucket is too small, padding is sampled, written or seen, a row of a state without a sequence enters, or
    a step's totals are told for another.
    """
    options = replace(tiny_batch.FOCUS, **CASES[name])
    lives = tiny_batch.start(options, length, 7, seed=length, stops=True)
    one, other = (Run(kind, lives, options, evicting) for kind in (StepRunner, GraphRunner))
    for index in range(150):
        for run in (one, other):
            run.step(elsewhere=index % 4 == 3)
        assert other.reports[-1].equal(one.reports[-1])
        if not one.state.columns.alive.any():
            break
    else:
        raise AssertionError('no end')
    assert other.history == one.history and other.runner.deferred == 0
    assert other.state.table[:7, -3].eq(0).all()


@pytest.mark.parametrize('hot', [False, True], ids=['greedy', 'sampled'])
def test_a_larger_batch_leaves_nothing_behind(hot, ample):
    """Seventeen sequences, then three of them, then none that runs, then others. Red when: rows, pages, stop words or
    sampling parameters of an earlier step reach a later one, or an index of it points beyond what there is now."""
    lives = tiny_batch.start(tiny_batch.FOCUS, 16, 17, seed=5, stops=True)
    one, other = (Run(kind, lives, tiny_batch.FOCUS, hot=hot) for kind in (StepRunner, GraphRunner))
    for run in (one, other):
        everything = torch.arange(23).repeat(17, 1)  # is a stop word of the first two
        everything[2:] = -1
        for _ in range(4):
            run.step(everything)
        assert run.state.columns.alive[:2].tolist() == [0, 0]
        alive = run.state.columns.alive.nonzero()[:, 0].tolist()
        run.take([*alive[1:8:3]])
        left = list(run.names)
        for _ in range(90):
            run.step()
        assert not run.state.columns.alive.any()
        run.take([])
        for name in (1, 2, 11, 4):
            run.state.append(tiny_batch.rows([lives[name]]))
            run.runner.join(1)
            run.names.append(name)
            run.history[name].append('again')
            run.step()
        for _ in range(30):
            run.step()
    assert len(left) >= 2 and other.runner.deferred == 0
    assert other.history == one.history
    for mine, its in zip(other.reports, one.reports, strict=True):
        assert mine.equal(its)


LITTLE = {'enter': (40, 200, 200), 'keep': (200, 32, 200), 'sample': (200, 200, 16), 'all': (48, 32, 16), 'own': ()}


@pytest.mark.parametrize('hot', [False, True], ids=['greedy', 'sampled'])
@pytest.mark.parametrize('room', LITTLE)
@pytest.mark.parametrize('options', [{}, pytest.param({'cache': 'off'}, marks=pytest.mark.slow),
                                     pytest.param({'commit': 'full'}, marks=pytest.mark.slow)], ids=str)
def test_waiting_changes_nothing(options, room, hot, monkeypatch):
    """Room for a few sequences, or as the host predicts it: each goes the same way, step for step and token for token,
    only later.

    Red when: one that waits advances anywhere, draws another number, loses its commit or has it done twice; what a
    sequence keeps depends on who is there; or one waits forever.
    """
    options = replace(tiny_batch.FOCUS, **options)
    lives = tiny_batch.start(options, 16, 9, seed=7, stops=True)
    one, other = (Run(kind, lives, options, hot=hot) for kind in (StepRunner, GraphRunner))
    while one.state.columns.alive.any():
        one.step()
    if room != 'own':
        monkeypatch.setattr(Pacer, 'predict', lambda self, count, evicting: self._learn() or LITTLE[room])
    steps = 0
    while other.state.columns.alive.any():
        other.step()
        steps += 1
        assert steps < 600
    assert steps > len(one.reports) or room == 'own'
    assert other.history == one.history
    for _ in range(2):
        other.step()  # the last totals are read two steps later
    assert other.runner.deferred == other.waited > 0


def test_the_buckets_of_a_step(monkeypatch):
    """Red when: a part runs with more or fewer rows than the device was told in this step."""
    lives = tiny_batch.start(tiny_batch.FOCUS, 16, 5, seed=1)
    run = Run(GraphRunner, lives, tiny_batch.FOCUS)
    for predicted, rows in (((150, 33, 9), (160, 40, 16)), ((64, 33, 9), (64, 40, 16)), ((64, 8, 1), (64, 8, 8)),
                            ((150, 160, 128), (160, 160, 128))):
        monkeypatch.setattr(Pacer, 'predict', lambda self, count, evicting, predicted=predicted: predicted)
        sampled, head = [], run.batch.model.head
        monkeypatch.setattr(run.batch.model, 'head', lambda hidden, sampled=sampled, head=head: (
            sampled.append(len(hidden)), head(hidden))[1])
        for layer in run.batch.model.decoder.layers:
            layer.seen.clear()
        run.step()
        enter, keep, draw = rows
        assert run.runner.view.pace.limits.tolist() == [*rows]
        assert [layer.seen for layer in run.batch.model.decoder.layers] == [
            [('queries', enter), ('finish', enter)], [('queries', enter), ('finish', keep)],
            [('queries', keep), ('finish', keep)]]
        assert sampled == [draw]
        monkeypatch.setattr(run.batch.model, 'head', head)


@pytest.mark.parametrize('largest', [1, 2, 3, 8, 17, 100, 256, 300])
def test_buckets_hold_every_size(largest):
    """Red when a row count finds no bucket, or one far larger than itself."""
    for length in (4, 16, 32, 64):
        buckets = row_buckets(largest * length)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] >= largest * length
        for below, above in zip([0, *buckets], buckets, strict=False):
            assert above - below <= max(8, 0.2 * above)
    assert torch.tensor(row_buckets(8192)).diff().max() <= 512


OPTIONS = {
    'focus': {},
    'reference view, full commit': {'focus_kv_visible': 'reference', 'focus_commit': 'full'},
    'sequential': {'dllm_unmasking_strategy': 'sequential', 'dllm_denoising_steps': 16},
    'block 8': {'dllm_block_length': 8},
}


@pytest.fixture
def on_buffers(monkeypatch):
    """Makes an engine use fixed buffers until the test ends."""
    from lmdeploy_focus.engine.model_agent import FocusModelAgent
    agents = []
    original = FocusModelAgent._build_runner

    def build(self):
        plain = original(self)
        config = self.cache_engine.cache_config
        columns = config.num_gpu_blocks * (config.block_size // plain.options.page_size)
        return GraphRunner(plain.model, plain.options, plain.evicting, plain.state, columns,
                           columns * plain.options.page_size, graphs=False)

    def switch(pipe):
        monkeypatch.setattr(FocusModelAgent, '_build_runner', build)
        agents.append(pipe.async_engine.engine.executor.model_agent)
        agents[-1]._runner = None
        return agents[-1]

    yield switch
    for agent in agents:
        agent._runner = None


def _counted(pipe, run):
    """What `run` returns, and the counters that it adds; but for those who waited, whom only fixed buffers know."""
    from lmdeploy_focus import run_stats
    before = run_stats(pipe)
    result = run()
    return result, {name: value - before[name] for name, value in run_stats(pipe).items() if name != 'deferred_steps'}


@pytest.mark.parametrize('name', OPTIONS)
def test_tokens_and_rows_of_an_engine(name, pipelines, decode, demo_items, on_buffers):
    """Token for token in fp32, and row for row.

    Red when the plan, the buckets, the padding or a stale buffer of an earlier, larger batch changes a step.
    """
    pipe = pipelines(dtype='float32', max_batch_size=16, **OPTIONS[name])
    prompts = [item.prompt for item in demo_items[:24]]  # more than a batch: sequences come and go
    expected = _counted(pipe, lambda: decode(pipe, prompts))
    agent = on_buffers(pipe)
    assert _counted(pipe, lambda: decode(pipe, prompts)) == expected
    assert isinstance(agent.runner, GraphRunner)


def test_an_engine_without_room(pipelines, decode, demo_items, on_buffers, monkeypatch):
    """Room for a third of the sequences: the same answers, and the same work. Red when the host believes that one ran
    which had to wait, or forgets that its block is still to be committed."""
    from lmdeploy_focus import run_stats
    pipe = pipelines(dtype='float32', max_batch_size=16)
    prompts = [item.prompt for item in demo_items[:24]]
    expected = _counted(pipe, lambda: decode(pipe, prompts))
    agent = on_buffers(pipe)
    monkeypatch.setattr(Pacer, 'predict', lambda self, count, evicting: self._learn() or (160, 64, 32))
    assert _counted(pipe, lambda: decode(pipe, prompts)) == expected
    assert run_stats(pipe)['deferred_steps'] >= agent.runner.deferred > 50


def test_sampled_rows_are_processed_one_by_one(pipelines, demo_items, on_buffers):
    """Penalties, bans and company with other parameters go through the logits. Red when they meet padded rows."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32', max_batch_size=16)
    prompts = [item.prompt for item in demo_items[:6]]
    configs = [GenerationConfig(max_new_tokens=40, do_sample=False, bad_token_ids=[224]),
               GenerationConfig(max_new_tokens=40, do_sample=True, temperature=1.3, top_k=20, random_seed=5),
               GenerationConfig(max_new_tokens=40, do_sample=False, min_new_tokens=38)] * 2
    expected = [list(answer.token_ids) for answer in pipe(prompts, gen_config=configs)]
    on_buffers(pipe)
    assert [list(answer.token_ids) for answer in pipe(prompts, gen_config=configs)] == expected
    assert all(224 not in tokens for tokens in expected[::3])
    assert all(len(tokens) >= 38 for tokens in expected[2::3])
