"""What the study of DFlash's throughput makes of its measurements, the shapes that it writes, and what it refuses."""
import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from eval import dflash_throughput
from eval.study import dflash_measure, dflash_report, qwen3_shapes
from eval.study.closed_loop import Run
from lmdeploy_focus.dflash.admission import check_pair
from lmdeploy_focus.dflash.drafter import parse_drafter

from .conftest import ROOT

TINY = qwen3_shapes.SHAPES['tiny-qwen3']


def test_rounds_around_a_prefill_are_left_out(monkeypatch):
    """Red when the time of a prefill, or of a pause between runs, counts as a round's."""

    class Steps:
        forwards = prefills = 0

    steps, now = Steps(), [0.0]
    rounds = dflash_measure.Rounds(steps)
    monkeypatch.setattr(dflash_measure.time, 'perf_counter', lambda: now[0])
    for at, name in ((1, 'prefills'), (2, 'forwards'), (3, 'forwards'), (9, 'prefills'), (12, 'forwards'),
                     (14, 'forwards')):
        now[0] = at
        setattr(steps, name, getattr(steps, name) + 1)
        rounds()
    run = Run(0.0, steady=1.0, no_more=20.0, at={'steady': {'a': 0}, 'no_more': {'a': 1}})
    assert rounds.milliseconds(run) == [1000, 2000]
    run.steady = 2.5
    assert rounds.milliseconds(run) == [2000]


def test_published_shapes():
    """Red when a shape is not the published one, or a floor counts what is not read: 15.1 GB of the target and 3.3 of
    the drafter, their head in both."""
    shape = qwen3_shapes.SHAPES['qwen3-8b']
    assert sum(np.prod(size) for size in shape.sizes().values()) == pytest.approx(8.19e9, rel=0.002)
    small = qwen3_shapes.SHAPES['qwen3-1.7b']
    assert sum(np.prod(size) for size in small.sizes().values()) == pytest.approx(1.72e9, rel=0.002)
    assert shape.target_bytes() == pytest.approx(15.14e9, rel=0.001)
    assert shape.draft_bytes() == pytest.approx(3.34e9, rel=0.001)
    # keys and values of 8 heads x 128 in bf16
    assert shape.target_bytes(1000) - shape.target_bytes() == 1000 * 36 * 4096
    assert shape.draft_bytes(1000) - shape.draft_bytes() == 1000 * 5 * 4096
    drafter = parse_drafter(shape.draft_config(), 'drafter')
    assert (drafter.target_layer_ids, drafter.block_size, drafter.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151669)
    for each in qwen3_shapes.SHAPES.values():
        check_pair('target', each.config(), parse_drafter(each.draft_config(), 'drafter'))
    with pytest.raises(ValueError, match='--shape is qwen3-9b; it must be one of qwen3-8b'):
        qwen3_shapes.places('qwen3-9b', ROOT)


def made_up(engine, acceptance, batch, speed, **figures):
    run = dict.fromkeys(dflash_report.FIGURES)
    return run | {'engine': engine, 'acceptance': acceptance, 'batch': batch, 'tokens_per_s': speed,
                  'tokens_per_s_whole': 500.0, 'acceptance_length': acceptance or 1.0, 'context': 100.0} | figures


def test_lines_and_goals(tmp_path):
    """Red when a median, a ratio, a floor or a goal's worst value is computed from other runs, or a column is lost."""
    shape = qwen3_shapes.SHAPES['qwen3-8b']
    runs = [made_up('plain', None, 1, speed, ms_per_round=4.0, forward_ms=3.6) for speed in (240.0, 250.0, 260.0)]
    runs += [made_up('plain', None, 256, 9000.0, ms_per_round=20.0)]
    runs += [made_up('dflash', 5.0, 1, 1000.0, ms_per_round=4.8, forward_ms=3.8, draft_ms=0.9),
             made_up('dflash', 3.0, 256, 8100.0, ms_per_round=80.0), made_up('dflash', 3.0, 1, None)]
    lines = dflash_report.summarise(runs, shape, 4800e9)
    plain, large, five, at_large, whole = lines
    assert (plain['tokens_per_s'], plain['spread'], plain['repeats'], plain['speedup']) == (250, 0.08, 3, None)
    assert plain['floor_ms'] == pytest.approx(1e3 * shape.target_bytes(100) / 4800e9, rel=1e-4)
    assert large['floor_ms'] == pytest.approx(1e3 * shape.target_bytes(25600) / 4800e9, rel=1e-4)
    assert five['floor_ms'] == pytest.approx(plain['floor_ms'] + 1e3 * shape.draft_bytes(100) / 4800e9, rel=1e-4)
    assert five['floor_ratio'] == pytest.approx(4.8 / five['floor_ms'], rel=1e-3)
    assert (five['speedup'], five['speedup_per_token']) == (4, 0.8)
    assert five['round_ratio'] == pytest.approx(4.8 / (3.8 + 3.6 * 3.343 / 15.136), rel=1e-3)
    assert (at_large['speedup'], at_large['round_ratio'], whole['steady']) == (0.9, None, False)
    found = {goal['goal']: (goal['value'], goal['met']) for goal in dflash_report.goals(lines[:4])}
    assert list(found.values()) == [(plain['floor_ratio'], False), (five['round_ratio'], True), (0.8, True),
                                    (0.9, False)]
    without = dflash_report.summarise(runs[4:5], shape, None)
    assert without[0]['floor_ms'] is without[0]['speedup'] is None
    assert all(goal['met'] is None for goal in dflash_report.goals(without))
    assert 'speedup_per_token' in dflash_report.table(lines)
    dflash_report.write(tmp_path, {'settings': {}}, runs, lines)
    with open(tmp_path / 'dflash_throughput.csv') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and rows[2]['speedup'] == '4.0'
    assert {'engine', 'acceptance', 'batch', 'repeats', 'steady', 'spread', 'speedup', 'speedup_per_token', 'floor_ms',
            'floor_ratio', 'round_ratio', *dflash_report.FIGURES} == set(rows[0])
    assert len(json.loads((tmp_path / 'dflash_throughput.json').read_text())['goals']) == 4


@pytest.mark.parametrize('arguments, message', [
    ('--shape sdar-8b', '--shape is sdar-8b; it must be one of qwen3-8b, qwen3-1.7b, tiny-qwen3'),
    ('--acceptance 1,17', '--acceptance is 17.0; it must be at least 1 and at most 16'),
    ('--acceptance 3 --draft-tokens 1', '--acceptance is 3.0; it must be at least 1 and at most 2'),
    ('--acceptance one', "--acceptance is 'one'; it must be numbers"),
    ('--acceptance nan', '--acceptance is nan; it must be at least 1'),
    ('--draft-tokens 16', '--draft-tokens is 16; it must be at least 1 and at most 15'),
    ('--draft-tokens 0', '--draft-tokens is 0; it must be at least 1'),
    ('--batches 0', '--batches is 0; it must be at least 1'),
    ('--batches 65 --device cpu', '--batches is 65; it must be at least 1 and at most 64'),
    ('--batches 8 --max-batch-size 4', '--max-batch-size is 4; it must be at least 8'),
    ('--engines stock', '--engines is stock; it must be one of plain, dflash'),
    ('--repeats 0', '--repeats is 0; it must be at least 1'),
    ('--seconds 0', '--seconds is 0.0; it must be at least 0.1'),
    ('--forwards -1', '--forwards is -1; it must be at least 0'),
    ('--bandwidth 0', '--bandwidth is 0.0; it must be at least 1'),
    ('--cache-share 1', '--cache-share is 1.0; it must be at least 0.01 and at most 0.99'),
])
def test_bad_input(arguments, message, capsys):
    """Red when a value outside its bounds is taken, or the message lacks the option, the value or the bound."""
    with pytest.raises(SystemExit) as raised:
        dflash_throughput.parse(arguments.split())
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path):
    """The real command on a CPU. Red when it does not run, or its lines are not those of what was asked for."""
    command = [sys.executable, 'eval/dflash_throughput.py', '--shape', 'tiny-qwen3', '--device', 'cpu', '--batches',
               '1,2', '--acceptance', '1,4', '--requests', '4', '--max-new', '48', '--repeats', '2', '--forwards', '2',
               '--weights', tmp_path / 'weights', '--out', tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert 'speed-up by acceptance length, batch 1' in done.stdout
    with open(tmp_path / 'dflash_throughput.csv') as file:
        lines = list(csv.DictReader(file))
    assert [(line['engine'], line['acceptance'], line['batch']) for line in lines] == [
        ('plain', '', '1'), ('plain', '', '2'), ('dflash', '1.0', '1'), ('dflash', '4.0', '1'), ('dflash', '1.0', '2'),
        ('dflash', '4.0', '2')]
    for line in lines:
        assert float(line['acceptance_length']) == pytest.approx(float(line['acceptance'] or 1), abs=1)
        assert line['repeats'] == '2' and float(line['forward_ms']) > 0 and line['floor_ms'] == ''
    runs = json.loads((tmp_path / 'dflash_throughput.json').read_text())['runs']
    assert len({(run['repeat'], run['tokens']) for run in runs}) == 2 and all(run['requests'] == 4 for run in runs)
