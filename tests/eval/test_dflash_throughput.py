"""The throughput study of DFlash in the engine on a CPU: replayed acceptance, times, and the closed loop."""
import asyncio
import itertools
import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eval.study import dflash_measure, qwen3_shapes
from eval.study.acceptance_replay import STRATA, AcceptanceReplay, draw, probability
from eval.study.closed_loop import ClosedLoop, Stop
from eval.study.forward_times import ForwardTimes
from eval.study.workload import Lengths, Request
from lmdeploy_focus.dflash import replay as injected
from lmdeploy_focus.dflash.verify import accept

TINY = qwen3_shapes.SHAPES['tiny-qwen3']
K = TINY.block_size - 1


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """Folder of the tiny shape's checkpoints."""
    folder = tmp_path_factory.mktemp('weights')
    qwen3_shapes.write('tiny-qwen3', folder, 'cpu')
    return folder


class Started:
    """An engine of the study in this process, with an event loop in a thread of its own: an engine that waits is in
    inference mode, which would be that of every later test in this thread."""

    def __init__(self, folder, drafted, replay):
        target, draft = map(str, qwen3_shapes.places('tiny-qwen3', folder))
        job = dflash_measure.DFlashJob(
            target, draft if drafted else None, K, 'cpu',
            {'max_batch_size': 4, 'session_len': 512, 'num_gpu_blocks': 64, 'dtype': 'float32'}, (None, ), 4000,
            Lengths(10, 10), None, [1], 1, Stop(1, None), 4, 0, 0)
        injected.use(replay)
        self.replay, self.engine = replay, dflash_measure.build(job)
        injected.use(None)
        self.loop, self.sessions = asyncio.new_event_loop(), itertools.count(1)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.call(self._start())

    async def _start(self):
        self.engine.start_loop()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=120)

    def answers(self, requests):
        """Token ids and acceptance of each of the requests [(prompt, length)], which run at once."""
        return self.call(self._all(requests))

    async def _all(self, requests):
        found = await asyncio.gather(*(self._one(*request) for request in requests))
        await asyncio.sleep(0.1)  # the step that the engine is ahead is over
        return found

    async def _one(self, prompt, length):
        from lmdeploy.messages import GenerationConfig
        config, ids, last = GenerationConfig(max_new_tokens=length, ignore_eos=True, top_k=1), [], None
        instance = self.engine.create_instance()
        async for output in instance.async_stream_infer(next(self.sessions), prompt, config):
            ids += output.token_ids or []
            last = output
        return ids, getattr(last.req_metrics, 'spec_info', None)

    def close(self):
        self.loop.call_soon_threadsafe(self.engine.close)
        self.call(self._ended())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    async def _ended(self):
        await asyncio.wait([self.engine._loop_main], timeout=10)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@pytest.fixture(scope='module')
def engines(checkpoints):
    """Returns a function: 'plain', 'dflash' or 'replayed' -> that engine, started."""
    made = {}

    def get(name):
        if name not in made:
            replay = AcceptanceReplay(K, 4, 'cpu') if name == 'replayed' else None
            made[name] = Started(checkpoints, name != 'plain', replay)
        return made[name]

    yield get
    for started in made.values():
        started.close()


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 4000, 12 + 9 * number).tolist() for number in range(count)]


@pytest.mark.parametrize('k, length', [(15, 1.0), (15, 3.0), (15, 5.0), (15, 7.0), (15, 16.0), (7, 2.5), (1, 1.3)])
def test_the_drawn_mean(k, length):
    """Red when the mean is off by more than 0.5% over all steps or 8% over as few as STRATA of them, counts leave 0 to
    k, the distribution is another one, or sequences or seeds draw alike."""
    counts = draw(length, k, 8, 3)
    assert counts.min() >= 0 and counts.max() <= k
    assert 1 + counts.mean() == pytest.approx(length, rel=0.005)
    assert 1 + counts.reshape(-1, STRATA, 8).mean(1) == pytest.approx(length, rel=0.08)
    rate = probability(length, k)
    for least in range(1, k + 1):
        assert (counts >= least).mean() == pytest.approx(rate ** least, abs=0.01)
    np.testing.assert_array_equal(counts, draw(length, k, 8, 3))
    if 1 < length < k + 1:
        assert (counts[:, 0] != counts[:, 1]).any() and (counts != draw(length, k, 8, 4)).any()
        assert np.corrcoef(counts[:, 0], counts[:, 1])[0, 1] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize('length', [0.5, 16.5])
def test_a_mean_that_no_draft_has(length):
    """Red when such a mean is silently another one."""
    with pytest.raises(ValueError, match=f'--acceptance has {length}; it must be at least 1 and at most 16'):
        probability(length, 15)


class CountLaunches(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = ('view', 'select', 'slice', 'unsqueeze', 'detach', 'expand', 'alias')
        self.count += not any(word in str(func) for word in views)
        return func(*args, **(kwargs or {}))


def test_replay_decides_whatever_the_tokens_are():
    """Red when a sample of a row that counts is emitted, whose keys the target never had, tokens that happen to agree
    prolong the replayed run or end it, or the replay costs more than three launches or any when it is off."""
    replay = AcceptanceReplay(3, 8, 'cpu')
    replay.choose(2.0)
    sampled, drafted = torch.randint(5, (6, 4)), torch.randint(5, (6, 3))
    drafted[0], drafted[1] = sampled[0, :3], sampled[1, :3] + 1
    for step in range(4):
        emitted, rejected, last = accept(sampled, drafted, replay)
        for row, count in enumerate(replay.counts[step, :6].tolist()):
            run = [*drafted[row, :count].tolist(), int(sampled[row, count])]
            assert emitted[row].tolist() == run + [-1] * (3 - count)
            assert (int(rejected[row]), int(last[row])) == (3 - count, run[-1])
    replay.choose(None)
    for one, other in zip(accept(sampled, drafted, replay), accept(sampled, drafted), strict=True):
        torch.testing.assert_close(one, other)
    replay.choose(2.0)
    with CountLaunches() as off:
        accept(sampled, drafted)
    with CountLaunches() as on:
        accept(sampled, drafted, replay)
    assert on.count == off.count + 3
    with pytest.raises(ValueError, match='room for 8 sequences, and there are 9'):
        replay.agreed(torch.zeros(9, 3))


def test_emitted_counts_are_the_drawn_ones(engines):
    """Red when a verification of the engine passes over the replay, asks it twice, or loses tokens that it let
    through."""
    started = engines('replayed')
    for length in (1.0, 3.0, K + 1.0):
        started.replay.choose(length)
        counts = started.replay.counts[:9, 0]
        # one token of the prefill, and nine verifications
        (ids, acceptance), = started.answers([(prompts(1)[0], 1 + int((counts + 1).sum()))])
        assert acceptance.verify_steps == 9
        assert acceptance.accepted_tokens == int(counts.sum()) == len(ids) - 10
        assert acceptance.steps_by_accepted == tuple(torch.bincount(counts, minlength=K + 1).tolist())


def test_state_follows_the_emitted_tokens(engines):
    """An answer cut at a verification and sent again with its prompt goes on as it did. Red when the keys, features or
    the last token that target and drafter go on from are not those of the emitted tokens."""
    started, prompt = engines('replayed'), prompts(1, 5)[0]
    started.replay.choose(3.0)
    drawn = started.replay.counts
    lengths = (drawn[:12, 0] + 1).cumsum(0).tolist()
    (whole, _), = started.answers([(prompt, 1 + lengths[-1])])
    assert len(set(whole)) > 8
    for cut in (2, 7):
        # the prefill now samples what verification number `cut` did
        kept = lengths[cut]
        started.replay.counts, started.replay.step = drawn[cut + 1:], 0
        (rest, _), = started.answers([(prompt + whole[:kept], 1 + lengths[-1] - kept)])
        assert rest == whole[kept:]


def test_replay_off_is_plain_decoding(engines):
    """Red when the injection point changes a token although nothing is replayed, or random weights are accepted."""
    requests = [(prompt, 24) for prompt in prompts(3)]
    expected = engines('plain').answers(requests)
    got = engines('dflash').answers(requests)
    assert [ids for ids, _ in got] == [ids for ids, _ in expected]
    assert all(acceptance.verify_steps > 15 for _, acceptance in got)
    assert engines('dflash').engine.executor.model_agent.spec_agent._replay is None


@pytest.mark.parametrize('name, times', [('plain', {'forward_ms'}), ('dflash', {'forward_ms', 'draft_ms'})])
def test_timed_forwards_change_no_token(name, times, engines):
    """Red when a repeated forward leaves a trace, is not timed, or is timed with fewer sequences than asked for."""
    started, requests = engines(name), [(prompt, 16) for prompt in prompts(2, 9)]
    expected = [ids for ids, _ in started.answers(requests)]
    timer, over = ForwardTimes(started.engine, 2, 'cpu'), []
    timer.done = lambda: over.append(1)
    timer.begin(2)
    assert started.answers(requests[:1])[0][0] == expected[0] and not timer.found
    assert [ids for ids, _ in started.answers(requests)] == expected
    assert set(timer.found) == times and over == [1]
    assert all(value > 0 for value in timer.found.values())


def test_a_run_in_the_closed_loop(engines, monkeypatch):
    """Red when tokens, rounds, the measured acceptance length or the context of a run are not those of its steps."""
    from lmdeploy_focus import stats
    started = engines('replayed')
    monkeypatch.setattr(stats, 'observe', stats.observe)  # which the counting replaces
    counted = dflash_measure.Counted()
    rounds = dflash_measure.Rounds(counted)
    started.replay.choose(4.0)
    sent = [Request(prompt, 40) for prompt in prompts(4)]

    def snapshot():
        return {**stats.snapshot(started.engine.scheduler), 'forwards': counted.forwards, 'prefills': counted.prefills}

    run = started.call(ClosedLoop(started.engine, 2, iter(sent), Stop(4, None), snapshot, started.sessions)())
    found = dflash_measure.of_run(run, 2, rounds.milliseconds(run), sent)
    assert (found['requests'], found['tokens'], found['batch']) == (4, 160, 2)
    assert found['acceptance_length'] == round(1 + found['accepted_tokens'] / found['verify_steps'], 4)
    # 40 tokens a request: the last verification of each is cut
    assert 3 < found['acceptance_length'] < 5
    assert 0 < found['rounds'] < found['forwards'] and found['ms_per_round'] > 0
    assert found['context'] == pytest.approx(np.mean([len(request.prompt) for request in sent]) + 20)
