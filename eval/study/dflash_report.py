"""Medians and spreads of the runs with a drafter, their speed-up over plain decoding, floors, goals, and the files."""
from pathlib import Path
from typing import Any

from . import report
from .qwen3_shapes import Qwen3

# of a run, in the order of the CSV
FIGURES = ('tokens_per_s', 'tokens_per_s_whole', 'ms_per_round', 'ms_per_step', 'acceptance_length', 'forward_ms',
           'draft_ms', 'context', 'ttft_ms_p50', 'ttft_ms_p99', 'itl_ms_p50', 'itl_ms_p99', 'joules_per_token',
           'rounds', 'prefills', 'steady_seconds', 'requests', 'gpu_gib')
SHOWN = (('engine', '{}'), ('acceptance', '{:g}'), ('batch', '{}'), ('tokens_per_s', '{:.1f}'), ('spread', '{:.1%}'),
         ('ms_per_round', '{:.3f}'), ('acceptance_length', '{:.2f}'), ('speedup', '{:.2f}'),
         ('speedup_per_token', '{:.3f}'), ('floor_ms', '{:.3f}'), ('floor_ratio', '{:.2f}'), ('forward_ms', '{:.3f}'),
         ('draft_ms', '{:.3f}'), ('round_ratio', '{:.3f}'))


def summarise(runs: list[dict[str, Any]], shape: Qwen3, bandwidth: float | None) -> list[dict[str, Any]]:
    """One line for each engine, acceptance length and batch.

    Figures are medians over the repeats. `spread` is (largest - smallest) / median of tokens_per_s; where a run had no
    steady state, the whole run's stand for it. `speedup` is tokens_per_s by plain decoding's at this batch, prefills in
    both; `speedup_per_token` that by the measured acceptance length. `floor_ms` is the time to read weights, keys and
    values of a round once, `floor_ratio` the round's by it. `round_ratio` is the round's time by that of one
    verification and, for the drafter, its share of a plain forward by bytes.

    Args:
        runs: of `dflash_measure`.
        shape: of target and drafter.
        bandwidth: of the memory in bytes a second; None leaves the floors out.
    """
    lines = [_line(key, [run for run in runs if _key(run) == key], shape, bandwidth)
             for key in dict.fromkeys(map(_key, runs))]
    plain = {line['batch']: line for line in lines if line['engine'] == 'plain'}
    share = shape.draft_bytes() / shape.target_bytes()
    for line in lines:
        base = plain.get(line['batch'])
        if base is None or line['engine'] == 'plain':
            continue
        line['speedup'] = round(line['tokens_per_s'] / base['tokens_per_s'], 4)
        line['speedup_per_token'] = round(line['speedup'] / line['acceptance_length'], 4)
        if line['ms_per_round'] and line['forward_ms'] and base['forward_ms']:
            least = line['forward_ms'] + share * base['forward_ms']
            line['round_ratio'] = round(line['ms_per_round'] / least, 4)
    return lines


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run['engine'], run['acceptance'], run['batch']


def _line(key: tuple[Any, ...], chosen: list[dict[str, Any]], shape: Qwen3, bandwidth: float | None) -> dict[str, Any]:
    line: dict[str, Any] = dict(zip(('engine', 'acceptance', 'batch'), key, strict=True))
    line |= report.medians(chosen, FIGURES)
    line |= dict.fromkeys(('speedup', 'speedup_per_token', 'floor_ms', 'floor_ratio', 'round_ratio'))
    if bandwidth is not None:
        context = line['batch'] * line['context']
        read = shape.target_bytes(context) + (shape.draft_bytes(context) if line['engine'] == 'dflash' else 0)
        line['floor_ms'] = round(1e3 * read / bandwidth, 4)
        if line['ms_per_round']:
            line['floor_ratio'] = round(line['ms_per_round'] / line['floor_ms'], 4)
    return line


def goals(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the study is for, with the worst value found; `value` and `met` are None where nothing was measured."""
    single = [line for line in lines if line['batch'] == 1]
    wanted = (('plain decoding by its floor, batch 1', '<=', 1.10, 'floor_ratio', 'plain', single),
              ('round by verification and drafting, batch 1', '<=', 1.10, 'round_ratio', 'dflash', single),
              ('speed-up by acceptance length, batch 1', '>=', 0.75, 'speedup_per_token', 'dflash', single),
              ('speed-up, any batch', '>=', 0.97, 'speedup', 'dflash', lines))
    found = []
    for goal, sign, bound, name, engine, among in wanted:
        values = [line[name] for line in among if line['engine'] == engine and line[name] is not None]
        value = (max if sign == '<=' else min)(values) if values else None
        met = None if value is None else value <= bound if sign == '<=' else value >= bound
        found.append({'goal': goal, 'bound': f'{sign} {bound:.2f}', 'value': value, 'met': met})
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """The lines for a terminal."""
    return report.table(lines, SHOWN)


def write(out: Path, about: dict[str, Any], runs: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    """`dflash_throughput.csv` of the lines, `dflash_throughput.json` of everything."""
    report.write(out, 'dflash_throughput', lines, {'about': about, 'goals': goals(lines), 'lines': lines, 'runs': runs})
