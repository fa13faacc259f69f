"""Medians and spreads of the measured runs, their ratios to stock, and the files."""
import csv
import json
import statistics
from pathlib import Path
from typing import Any

# of a run, in the order of the CSV
FIGURES = ('tokens_per_s', 'tokens_per_s_whole', 'decoded_per_s', 'ms_per_step', 'tokens_per_step', 'rows_per_token',
           'prefix_rows_per_token', 'rows_per_forward', 'ttft_ms_p50', 'ttft_ms_p99', 'itl_ms_p50', 'itl_ms_p99',
           'joules_per_token', 'steady_seconds', 'requests', 'gpu_gib')
SHOWN = (('engine', '{}'), ('batch', '{}'), ('tokens_per_s', '{:.1f}'), ('spread', '{:.1%}'), ('ms_per_step', '{:.2f}'),
         ('tokens_per_step', '{:.2f}'), ('rows_per_token', '{:.2f}'), ('ttft_ms_p50', '{:.0f}'),
         ('itl_ms_p50', '{:.2f}'), ('itl_ms_p99', '{:.2f}'), ('gpu_gib', '{:.1f}'), ('ratio', '{:.2f}'),
         ('ratio_at_equal_steps', '{:.2f}'))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each engine and batch.

    Figures are medians over the repeats. `spread` is (largest - smallest) / median of tokens_per_s. `ratio` is
    tokens_per_s by stock's at this batch; `ratio_at_equal_steps` what that would be if both decoded as many tokens a
    step as stock. Where a run had no steady state, the whole run's tokens_per_s stand for it.
    """
    lines = []
    for engine, batch in dict.fromkeys((run['engine'], run['batch']) for run in runs):
        chosen = [run for run in runs if (run['engine'], run['batch']) == (engine, batch)]
        lines.append({'engine': engine, 'batch': batch, **medians(chosen, FIGURES)})
    stock = {line['batch']: line for line in lines if line['engine'] == 'stock'}
    for line in lines:
        base = stock.get(line['batch'])
        line['ratio'] = line['ratio_at_equal_steps'] = None
        if base is not None:
            line['ratio'] = round(line['tokens_per_s'] / base['tokens_per_s'], 4)
            if line['tokens_per_step'] and base['tokens_per_step']:
                equal = line['ratio'] * base['tokens_per_step'] / line['tokens_per_step']
                line['ratio_at_equal_steps'] = round(equal, 4)
    return lines


def medians(runs: list[dict[str, Any]], figures: tuple[str, ...]) -> dict[str, Any]:
    """Figures of a line: medians over its runs, None where none has the figure; how many they are, whether all had a
    steady state, and the spread of tokens_per_s. Where a run had no steady state, its whole tokens_per_s counts."""
    line: dict[str, Any] = {'repeats': len(runs), 'steady': all(run['tokens_per_s'] for run in runs)}
    for name in figures:
        values = [run[name] for run in runs if run.get(name) is not None]
        line[name] = round(statistics.median(values), 4) if values else None
    speeds = [run['tokens_per_s'] or run['tokens_per_s_whole'] for run in runs]
    line['tokens_per_s'] = round(statistics.median(speeds), 4)
    line['spread'] = round((max(speeds) - min(speeds)) / statistics.median(speeds), 4)
    return line


def table(lines: list[dict[str, Any]], shown: tuple[tuple[str, str], ...] = SHOWN) -> str:
    """The lines for a terminal: the columns of `shown`, each with its format."""
    rows = [[name for name, _ in shown]]
    rows += [['-' if line[name] is None else form.format(line[name]) for name, form in shown] for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(shown))]
    return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write(out: Path, name: str, lines: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """`NAME.csv` of the lines, `NAME.json` of everything."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f'{name}.csv', 'w', newline='') as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)
    (out / f'{name}.json').write_text(json.dumps(whole, indent=1) + '\n')
