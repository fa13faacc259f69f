"""Time the Triton kernels at the shape of SDAR-8B, beside the least that memory and tensor cores allow.

    python scripts/bench_kernels/run.py --only ragged_attention kv_fill --out kernels.json

Each file beside this one is a kernel: its `cases()` yields (name, fn, bytes moved, floating-point operations) of one
call. The calls are captured in a CUDA graph, so that no launch time of Python is measured; `fn` takes another layer's
tensors at each call, so that a small cache is not read from L2. A time is the median of the graph's replays over the
calls in it. The floor is the larger of operations at 790 TFLOP/s and bytes at 4 TB/s, what an H200 reaches.
"""
import argparse
import json
import runpy
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Case = tuple[str, Callable[[], object], int, int]

FLOPS_PER_SECOND = 790e12
BYTES_PER_SECOND = 4e12
HEADER = f'{"case":<56}{"us":>9}{"p10":>9}{"p90":>9}{"GB/s":>8}{"TFLOP/s":>9}{"floor us":>10}{"ratio":>7}'
FOLDER = Path(__file__).resolve().parent


def load_cases(stem: str) -> Iterator[Case]:
    """The cases of one file."""
    return runpy.run_path(str(FOLDER / f'{stem}.py'))['cases']()


def capture(fn: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls; compiles and warms up first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, calls: int, repeats: int) -> list[float]:
    """Seconds a call of each replay, after two that are not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / calls for start, end in zip(events[2:], events[3:], strict=False)]


def measure(case: Case, calls: int, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    name, fn, moved, flops = case
    times = time_replays(capture(fn, calls), calls, repeats)
    seconds = statistics.median(times)
    floor = max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
    low, *_, high = statistics.quantiles(times, n=10)
    return {'name': name, 'seconds': seconds, 'p10': low, 'p90': high, 'bytes': moved, 'flops': flops,
            'gigabytes_per_second': moved / seconds / 1e9, 'teraflops_per_second': flops / seconds / 1e12,
            'floor_seconds': floor, 'ratio_to_floor': seconds / floor if floor else None}


def line(row: dict[str, Any]) -> str:
    """A row under HEADER."""
    ratio = row['ratio_to_floor']
    return (f'{row["name"]:<56}{row["seconds"] * 1e6:9.2f}{row["p10"] * 1e6:9.2f}{row["p90"] * 1e6:9.2f}'
            f'{row["gigabytes_per_second"]:8.0f}{row["teraflops_per_second"]:9.1f}{row["floor_seconds"] * 1e6:10.2f}'
            f'{"" if ratio is None else f"{ratio:.2f}":>7}')


def main() -> None:
    stems = sorted(path.stem for path in FOLDER.glob('*.py') if path.stem not in ('run', 'shapes'))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='+', choices=stems, default=stems, metavar='KERNEL', help=', '.join(stems))
    parser.add_argument('--match', default='', help='only cases whose name contains this')
    parser.add_argument('--calls', type=int, default=36, help='calls in a graph (default: the 36 layers)')
    parser.add_argument('--repeats', type=int, default=21, help='replays that are timed')
    parser.add_argument('--out', type=Path, help='JSON file to write')
    options = parser.parse_args()
    if options.calls < 1 or options.repeats < 2:
        parser.error(f'--calls {options.calls} --repeats {options.repeats}: at least 1 and 2')
    if not torch.cuda.is_available():
        parser.error('a CUDA GPU is needed')
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    print(HEADER)
    rows = []
    for stem in options.only:
        for case in load_cases(stem):
            if options.match not in case[0]:
                continue
            rows.append(measure(case, options.calls, options.repeats))
            del case  # its tensors, before those of the next are made
            print(line(rows[-1]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__, 'calls': options.calls,
                  'repeats': options.repeats, 'cases': rows}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == '__main__':
    main()
