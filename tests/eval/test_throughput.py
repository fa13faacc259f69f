"""The throughput study: recordings, their replay in both engines, figures, and the command itself on a CPU."""
import csv
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from lmdeploy_focus.kernels import reference_enter, reference_plan, reference_settle
from lmdeploy_focus.kernels.layout import Pace, report_columns, state_columns, state_width
from torch.utils._python_dispatch import TorchDispatchMode

from eval import throughput
from eval.study import published, record, report, shapes, traces, workload
from eval.study.closed_loop import Run, figures
from eval.study.profiled import MARKER, SKIPPED, idle, timeline
from eval.study.replayed import EngineReplay, StockReplay, Tables
from eval.study.simulate import again

from .conftest import ROOT

MASK_TOKEN, CODE, HEADS, PAGE = 9, 1000, 2, 64


def recorded(length, mode):
    """A recording with blocks of every number of positions to decode, most of them whole."""
    waiting = np.concatenate([np.repeat(np.arange(1, length), 2), np.full(60, length)])
    return published.draw(published.Process(1.7, 0.2), length, mode, waiting)


def blocks_of(recording):
    """What may happen to a block: (masked before it began, maps decoded by its steps, kept rows)."""
    first = recording.first
    return {(int(recording.waiting[block]), tuple(recording.decoded[first[block]:first[block + 1]].tolist()),
             int(recording.suffix_rows[block])) for block in range(recording.blocks)}


class CountLaunches(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = ('view', 'select', 'slice', 'unsqueeze', 'detach', 'expand', 'alias', 'empty', 'reshape')
        self.count += not any(word in str(func) for word in views)
        return func(*args, **(kwargs or {}))


def test_the_demo_trace_has_the_evaluations_means():
    """Red when blocks are chosen with another mean, or a number of positions to begin with is missing."""
    assert traces.DEMO.stat().st_size < 1 << 20
    recordings, _ = traces.load(traces.DEMO)
    for mode, recording in recordings.items():
        means = recording.means()
        for name, goal in record.GOALS[mode].items():
            assert means[name] == pytest.approx(goal, rel=0.02), (mode, name)
        assert set(recording.waiting.tolist()) == set(range(1, 33)), mode


@pytest.mark.parametrize('mode', traces.MODES)
def test_a_recording_decides_its_own_rows(mode):
    """Red when half-precision deltas select other rows than those recorded, or a delta is stored with another token."""
    recording = traces.load(traces.DEMO)[0][mode]
    repeated = again(recording, mode)
    for name in ('steps', 'decoded', 'delta', 'prefix_rows', 'suffix_rows'):
        np.testing.assert_array_equal(getattr(repeated, name), getattr(recording, name), err_msg=name)


def test_a_recording_of_the_reference_decode(sdar, prompts):
    """Red when the recorder misses a block, a step, a commit or a row of them."""
    options = record.DecodeOptions(max_new=40, partial_block='decode', **record.OPTIONS['focus'])
    run, recorder = record.RoundedDecode(sdar, prompts[:2], options), record.Recorder(32)
    while run.running:
        recorder(run.step())
    recording, counters = recorder.recording(), [answer.counters for answer in run.results()]
    assert recording.blocks == sum(c.blocks for c in counters)
    assert int(recording.steps.sum()) == sum(c.steps for c in counters)
    assert int(recording.suffix_rows.sum()) == sum(c.suffix_rows for c in counters)
    assert int(recording.prefix_rows.sum()) == sum(c.prefix_rows for c in counters)
    assert int(recording.waiting.sum()) == sum(c.decoded_tokens for c in counters)
    np.testing.assert_array_equal(again(recording, 'focus').suffix_rows, recording.suffix_rows)


@pytest.mark.parametrize('key', published.FITTED)
def test_the_published_trace_has_the_published_means(key):
    """Red when the process or the selection changes: `fit` finds new numbers."""
    _, means = published.published(*key)
    dense, focus = published.ROWS[key]
    assert means['dense']['rows_per_token'] == pytest.approx(dense, rel=0.02)
    assert means['focus']['rows_per_token'] == pytest.approx(focus, rel=0.02)
    assert means['focus']['tokens_per_step'] == pytest.approx(published.tokens_per_step(key[1], dense, True), rel=0.02)


def fresh_table(length, prompts, answers):
    """State of sequences after the prefill of prompts of these lengths."""
    table = torch.zeros((len(prompts), state_width(length)), dtype=torch.int64)
    state = state_columns(table, length)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        inside = prompt % length
        table[row, :length] = MASK_TOKEN
        table[row, :inside] = 1
        state.masked[row] = (-1 << inside) & (traces.all_bits(length) if length < 64 else -1)
        state.uncached[row] = -1
        state.history[row], state.output_start[row] = prompt - inside, prompt
        state.appendable[row] = inside + answer
    state.progress.fill_(-1)
    state.alive.fill_(1)
    state.alpha.fill_(1.5)
    state.threshold.fill_(0.8)
    return table


def size(bits):
    """Positions of a map that may be negative."""
    return (int(bits) % 2**64).bit_count()


def decode(table, length, replay, evicting, limits=None):
    """Decode by the kernels' twins to the end: what each block went through, as in `blocks_of`, by sequence."""
    pace, sequences, state = Pace.unlimited('cpu'), len(table), state_columns(table, length)
    if limits is not None:
        pace.limits.copy_(torch.tensor(limits))
    pages, own = torch.zeros((sequences, 64), dtype=torch.int64), torch.rand((sequences, HEADS, length))
    stop_words = torch.full((sequences, 1), -1)
    done, maps, rows = ([[] for _ in range(sequences)], [[] for _ in range(sequences)], [0] * sequences)
    began = [size(bits) for bits in state.masked]
    while bool((state.alive != 0).any()):
        before = state.masked.tolist()
        entered = reference_enter.enter(table, pages, PAGE, pace, length)
        single = own[:, :1]  # what a step without eviction has
        first, second = replay.importances(table, entered, *((own, own) if evicting else (single, single)))
        plan = reference_plan.plan(first, second, table, entered, pace, length, keep=None if evicting else length)
        room = plan.sampled_sequence.size(0)
        tokens, scores = replay.decisions(table, plan, torch.full((room,), 7), torch.rand(room))
        told = report_columns(reference_settle.settle(table, entered, plan, pace, tokens, scores, stop_words,
                                                      MASK_TOKEN, length), length)
        for row in told.ran.nonzero()[:, 0].tolist():
            committed = size(plan.pending[row])
            if committed:
                waiting, steps, kept = done[row].pop()
                done[row].append((waiting, steps, kept + committed))
            rows[row] += int(told.kept[row]) - committed
            maps[row].append((before[row] & ~int(told.masked[row])) % 2**64)
            if int(told.masked[row]) == 0:
                done[row].append((began[row], tuple(maps[row]), rows[row]))
                maps[row], rows[row], began[row] = [], 0, length
        assert int(pace.turn) < 1000
    return done


@pytest.mark.parametrize('length', [16, 32, 64])
@pytest.mark.parametrize('mode', ['delayed', 'focus'])
@pytest.mark.parametrize('limits', [None, (150, 60, 40)])
def test_the_engine_follows_the_recording(length, mode, limits):
    """Red when a step's place in the recording is off by one, when deferral moves it, or when other rows are kept.

    The last block of a sequence ends early, and its rows are not committed.
    """
    recording = recorded(length, mode)
    prompts = [3, length, 2 * length - 1, 70, 128 + 5]
    table = fresh_table(length, prompts, [5 * length] * len(prompts))
    if limits is not None:
        limits = tuple(max(value, 2 * length) for value in limits)
    done = decode(table, length, EngineReplay(Tables(recording, 'cpu'), HEADS, 8), mode == 'focus', limits)
    seen = [block for sequence in done for block in sequence[:-1]]
    assert len(seen) >= 4 * len(prompts) and len(set(seen)) > len(seen) // 2
    assert set(seen) <= blocks_of(recording)


class Scores:
    """A stand-in of LMDeploy's unmasking processor."""

    def _get_scores(self, logits, token_ids):
        return logits.softmax(-1).gather(-1, token_ids[:, None])[:, 0]


@pytest.mark.parametrize('length', [16, 32, 64])
def test_stock_follows_the_recording(length):
    """Red when a code leads to another step than the next, or a prompt's tokens are taken for one."""
    recording = recorded(length, 'dense')
    stock = StockReplay(Tables(recording, 'cpu'), CODE, 0, 1)
    waiting = torch.tensor([length, length, 3, length - 1, 1, length])
    place = torch.arange(length)
    mask = (place < length - waiting[:, None]).to(torch.uint8)
    ids, taken = torch.where(mask == 1, CODE - 1, MASK_TOKEN), [[] for _ in waiting]
    while bool((mask == 0).any()):
        before = mask.clone()
        # what LMDeploy hands over: sampled tokens where masked, which may look like codes
        tokens = torch.where(mask != 0, ids, torch.randint(CODE + stock.codes, mask.shape)).flatten()
        logits = torch.zeros((mask.numel(), CODE + stock.codes))
        mask = stock.unmask(Scores(), logits, tokens, mask.flatten()).view(mask.shape)
        ids = torch.where(mask == 0, MASK_TOKEN, tokens.view(mask.shape))
        for row, bits in enumerate((((before == 0) & (mask == 1)).long() << place).sum(1).tolist()):
            if bits:
                taken[row].append(bits % 2**64)
    known = {(waiting, maps) for waiting, maps, _ in blocks_of(recording)}
    assert {(int(count), tuple(maps)) for count, maps in zip(waiting, taken, strict=True)} <= known
    left = mask.clone()
    stock.unmask(Scores(), logits, tokens, left.fill_(2).flatten())
    assert bool((left == 2).all())  # a commit decodes nothing


def test_few_operations_are_launched():
    """Red when a replay grows: it must not slow down what it measures. Stock's own rule launches 9, scores apart."""
    length, sequences = 32, 8
    tables = Tables(recorded(length, 'focus'), 'cpu')
    engine, stock = EngineReplay(tables, HEADS, sequences), StockReplay(tables, CODE, 0, 1)
    table = fresh_table(length, [5] * sequences, [99] * sequences)
    pages, own = torch.zeros((sequences, 64), dtype=torch.int64), torch.rand((sequences, HEADS, length))
    entered = reference_enter.enter(table, pages, PAGE, Pace.unlimited('cpu'), length)
    plan = reference_plan.plan(own, own, table, entered, Pace.unlimited('cpu'), length)
    room = plan.sampled_sequence.size(0)
    tokens, scores = torch.zeros(room, dtype=torch.int64), torch.rand(room)
    mask = torch.zeros(sequences * length, dtype=torch.uint8)
    ids, logits = torch.zeros(sequences * length, dtype=torch.int64), torch.zeros((sequences * length, 4))
    with CountLaunches() as importances:
        engine.importances(table, entered, own, own)
    with CountLaunches() as decisions:
        engine.decisions(table, plan, tokens, scores)
    with CountLaunches() as scored:
        Scores()._get_scores(logits, ids)
    with CountLaunches() as unmasking:
        stock.unmask(Scores(), logits, ids, mask)
    assert importances.count <= 11 and decisions.count <= 3
    assert unmasking.count - scored.count <= 13


@pytest.mark.parametrize('name', workload.WORKLOADS)
def test_lengths_have_their_means(name):
    """Red when the spread moves the mean, or two engines would see different requests."""
    lengths = workload.WORKLOADS[name]
    drawn = list(itertools.islice(workload.requests(lengths, 500, 0), 3000))
    assert np.mean([len(request.prompt) for request in drawn]) == pytest.approx(lengths.prompt, rel=0.1)
    assert np.mean([request.answer for request in drawn]) == pytest.approx(lengths.answer, rel=0.1)
    assert drawn[:9] == list(itertools.islice(workload.requests(lengths, 500, 0), 9))
    assert max(max(request.prompt) for request in drawn) < 500


def test_prompts_of_data_sets(tmp_path, demo_folder):
    """Red when a format is not understood; prompts get the chat template."""
    file = tmp_path / 'prompts.json'
    file.write_text(json.dumps([{'conversations': [{'from': 'human', 'value': 'one'}]}, {'problem': 'two'}, 'three',
                                {'conversation': [{'role': 'user', 'content': 'four'}]}]))
    prompts = workload.read_prompts(file, str(demo_folder / 'sdar'))
    assert len(prompts) == 4 and all(prompt[0] == 1 for prompt in prompts)
    file.write_text('{"prompt": "one"}\n{"answer": "none"}\n')
    with pytest.raises(ValueError, match='--dataset'):
        workload.read_prompts(file, str(demo_folder / 'sdar'))


def test_figures_of_a_run():
    """Red when tokens outside steady state are counted, or a gap is not shared by the tokens that it brought."""
    counters = dict.fromkeys(('steps', 'decoded_tokens', 'prefix_rows', 'suffix_rows', 'forwards', 'prefills'), 0)
    later = {'steps': 10, 'decoded_tokens': 20, 'prefix_rows': 200, 'suffix_rows': 60, 'forwards': 5, 'prefills': 1}
    run = Run(0.0, steady=1.0, no_more=3.0, end=4.0, events=[(1.0, 8), (2.0, 10), (3.0, 30), (4.0, 5)], first=[1.0],
              gaps=[(1.0, 10), (1.0, 30), (1.0, 5)],
              at={'start': counters, 'steady': counters, 'no_more': later, 'end': later})
    found = figures(run, 2)
    assert found['tokens_per_s'] == 20 and found['tokens_per_s_whole'] == 53 / 4
    assert (found['ms_per_step'], found['tokens_per_step'], found['rows_per_token']) == (400, 2, 3)
    assert (found['itl_ms_p50'], found['itl_ms_p99'], found['ttft_ms_p50']) == (33.3333, 200, 1000)
    lines = report.summarise([{'engine': engine, 'repeat': repeat, **found, 'tokens_per_s': speed,
                               'tokens_per_step': steps}
                              for engine, steps in (('stock', 2.0), ('focus', 1.0))
                              for repeat, speed in enumerate((90.0, 100.0, 120.0) if engine == 'stock' else (300.0,))])
    assert (lines[0]['tokens_per_s'], lines[0]['spread']) == (100, 0.3)
    assert (lines[1]['ratio'], lines[1]['ratio_at_equal_steps']) == (3, 6)
    assert 'ratio_at_equal_steps' in report.table(lines)


def test_gaps_of_overlapping_kernels():
    """Red when two streams at once count twice, or the time before the first or after the last kernel is lost."""
    assert idle([(5, 6), (1, 2), (1.5, 3), (1, 2)], 0, 9) == [1, 2, 3]
    assert idle([(0, 9)], 1, 8) == [] and idle([], 2, 4) == [2]


def test_a_timeline_of_steps():
    """Steps of 100 us: a kernel of 60, a gap of 5, a settle of 15, a gap of 20. Red when the first steps are looked at,
    which waited for the host, a gap counts as short that is none, or a step is one too many."""
    spans, at = [], 0.0
    for step in range(SKIPPED + 5):
        at += 1000 if step < SKIPPED else 0
        spans += [('product', at, at + 60), (f'{MARKER}_0', at + 65, at + 80)]
        at += 100
    found = timeline(spans[::-1])
    assert {name: found[name] for name in found if name != 'kernels'} == {
        'steps': 4, 'ms_per_step': 0.1, 'busy': 0.75, 'short_gaps': 5.0, 'long_gaps': 20.0, 'longest_gap': 20.0}
    assert found['kernels'] == [{'name': 'product', 'calls_per_step': 1.0, 'us_per_step': 60.0},
                                {'name': f'{MARKER}_0', 'calls_per_step': 1.0, 'us_per_step': 15.0}]
    with pytest.raises(ValueError, match=f'of {SKIPPED + 1} steps'):
        timeline(spans[:2 * (SKIPPED + 1)])


def test_an_unknown_shape():
    """Red when a shape is silently another one."""
    with pytest.raises(ValueError, match='sdar-8b'):
        shapes.place('sdar-9b', ROOT, 32)


@pytest.mark.parametrize('arguments, words', [
    (['--shape', 'llada2-mini'], "this package's own model of llada2_moe with focus off"),
    (['--shape', 'sdar-30b-a3b'], 'stock LMDeploy'),
    (['--model', ROOT / 'eval/demo_models/sdar'], 'stock LMDeploy'),
])
def test_the_report_says_what_stock_is(arguments, words):
    """Red when LLaDA2's ratio is told as one to stock LMDeploy, which has no such model."""
    assert throughput.stock(throughput.parse(list(map(str, arguments)))).startswith(words)


@pytest.mark.slow
@pytest.mark.parametrize('shape', ['tiny', 'tiny-sdar-moe', 'tiny-llada2'])
def test_the_command(shape, tmp_path):
    """The real command on a CPU. Red when an engine does not decode what was recorded for it."""
    command = [sys.executable, 'eval/throughput.py', '--shape', shape, '--device', 'cpu', '--batches', '2',
               '--requests', '4', '--max-new', '70', '--engines', 'stock,focus', '--trace', 'demo',
               '--profile', tmp_path, '--weights', tmp_path / 'weights', '--out', tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert 'replayed' in done.stdout
    assert ('own model of llada2_moe' in done.stdout) is (shape == 'tiny-llada2')
    with open(tmp_path / 'throughput.csv') as file:
        lines = list(csv.DictReader(file))
    assert [line['engine'] for line in lines] == ['stock', 'focus']
    runs = json.loads((tmp_path / 'throughput.json').read_text())['runs']
    assert all(run['requests'] == 4 and run['tokens'] > 0 for run in runs) and runs[0]['tokens'] == runs[1]['tokens']
    assert float(lines[1]['rows_per_token']) < float(lines[0]['rows_per_token']) / 2
    assert json.loads((tmp_path / 'focus-2.json').read_text())['kernels']
