"""What FOCUS itself costs in a step: a profile's kernels summed by stage, as in the paper's Appendix E.5.

    python -m eval.study.overhead DIR      (a folder of `eval/throughput.py --profile DIR`)

A kernel's stage is known by its name. Our kernels have one stage each; a matrix product may belong to a decode step or
to a prefill between two of them, so `prefill` has only what nothing but a prefill runs. `other` are small kernels of
torch: embeddings, gathers, fills, the replay of a recording.
"""
import json
import re
import sys
from pathlib import Path
from typing import Any

# stages in the order of the table, and what a kernel's name begins with or contains; the first that fits counts
STAGES = {
    'importance': r'^_partial_kernel|^_sum_kernel',
    'selection': r'^_enter_kernel|^_keep_kernel|^_rows_kernel',
    # the copies lie beside it: the batch on its way from one graph's buffers to the next one's
    'compaction': r'^_compact_kernel|^memcpy\d|^Memcpy DtoD',
    'settle': r'^_settle_kernel',
    'read-back': r'^Memcpy (DtoH|HtoD)',
    'head': r'^_part_kernel|^_row_kernel|^_chunk_kernel|^_candidate_kernel|^_draw_kernel',
    'attention': r'^_attend_kernel|^_reduce_kernel|^_work_kernel',
    'prefill': r'_flash_prefill|^_fill_kv_cache|^_flatten_kv_cache|^apply_rotary_pos_emb|^_fwd_grouped_split',
    # a product that is split over programs clears its counters
    'matrix products': r'^Memset|nvjet|gemm|gemv|splitKreduce|cutlass|cublas|fused_moe|^_gmm',
    'norms and activations': r'^_norm_rope_fill_kernel|^_context_fill_kernel|rms_norm|'
                             r'silu_and_mul|^triton_poi_fused_.*(cos|sin)',
    'communication': r'nccl|all_?reduce|all_?gather',
    'other': r''}
# what a step without FOCUS would not have; settle, head and the rest every decode of blocks needs in some form
OVERHEAD = ('importance', 'selection', 'compaction', 'read-back')
_PATTERNS = {stage: re.compile(pattern, re.IGNORECASE) for stage, pattern in STAGES.items()}
_FILE = re.compile(r'(?P<engine>\w+)-(?P<batch>\d+)\.json')


def stage_of(kernel: str) -> str:
    """The stage of a kernel's name."""
    return next(stage for stage, pattern in _PATTERNS.items() if pattern.search(kernel))


def breakdown(profile: dict[str, Any]) -> dict[str, Any]:
    """Where a step's time goes.

    Args:
        profile: what :meth:`eval.study.profiled.Profile.write` has written.

    Returns:
        `us_per_step`: microseconds of each stage, and of `host`: the time in which no kernel ran. `share`: the same by
        the step's time. `overhead`: the share of the stages of OVERHEAD, `overhead_and_host` with the idle time, which
        a stock step has too.

    Raises:
        ValueError: it is a profile of a CPU.
    """
    if profile['busy'] is None:
        raise ValueError('a profile of a CPU has no kernels: the breakdown needs one of a GPU')
    micros = dict.fromkeys(STAGES, 0.0)
    for kernel in profile['kernels']:
        micros[stage_of(kernel['name'])] += kernel['us_per_step']
    step, busy = 1e3 * profile['ms_per_step'], profile['busy']
    stages = {**micros, 'host': (1 - busy) * step}
    overhead = sum(micros[stage] for stage in OVERHEAD) / step
    return {'us_per_step': {stage: round(value, 2) for stage, value in stages.items()},
            'share': {stage: round(value / step, 5) for stage, value in stages.items()},
            'ms_per_step': profile['ms_per_step'], 'overhead': round(overhead, 5),
            'overhead_and_host': round(overhead + 1 - busy, 5)}


def of_files(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The breakdown of each profile, by its name without `.json`."""
    return {file.stem: breakdown(json.loads(file.read_text())) for file in files}


def profiles(folder: Path) -> list[Path]:
    """The profiles in a folder, small batches first.

    Raises:
        ValueError: there is none.
    """
    found = {(match['engine'], int(match['batch'])): file for file in folder.glob('*.json')
             if (match := _FILE.fullmatch(file.name))}
    if not found:
        raise ValueError(f'{folder} has no profile: their names are as focus-64.json')
    return [found[key] for key in sorted(found)]


def table(breakdowns: dict[str, dict[str, Any]]) -> str:
    """Microseconds a step and their share of it, a column a profile, for a terminal."""
    rows = [['us a step', *breakdowns]]
    for stage in (*STAGES, 'host'):
        rows.append([stage, *(_cell(one['us_per_step'][stage], one['share'][stage]) for one in breakdowns.values())])
    rows.append(['step', *(f'{1e3 * one["ms_per_step"]:.0f}        ' for one in breakdowns.values())])
    rows.append([f'overhead ({", ".join(OVERHEAD)})', *(f'{one["overhead"]:.1%}' for one in breakdowns.values())])
    rows.append(['overhead and host', *(f'{one["overhead_and_host"]:.1%}' for one in breakdowns.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return '\n'.join('  '.join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                          zip(row[1:], widths[1:], strict=True))]) for row in rows)


def _cell(micros: float, share: float) -> str:
    return f'{micros:.0f} ({share:6.2%})'


if __name__ == '__main__':
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(table(of_files(profiles(Path(sys.argv[1])))))
