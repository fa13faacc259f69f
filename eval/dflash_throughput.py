"""Engine-level throughput with a DFlash drafter and without, in a closed loop, by acceptance length.

    python eval/dflash_throughput.py --shape qwen3-8b --acceptance 1,3,5,7 --batches 1,8,64,256 --seconds 5
    python eval/dflash_throughput.py --shape tiny-qwen3 --device cpu --acceptance 1,4 --batches 1,2 --requests 4

`batch` streams each send their next request when one ends. Plain decoding is the same engine class with the same
options and the same requests, without a drafter: stock LMDeploy. Each engine has a process of its own, one after the
other; the one with the drafter is built once for all acceptance lengths. Throughput is that of steady state, from the
moment when every stream has tokens to the moment when a stream finds no next request, prefills included; a round's time
is the median of those between two decode steps.

The weights are random, so the drafter is never right. How many of its tokens count is replayed, drawn for each sequence
and step with the given mean (`eval/study/acceptance_replay.py`); everything is computed all the same, the samples of
the rejected rows too. An acceptance length is accepted tokens of a verification and the target's own.

Floors are bytes of weights, keys and values by the memory's bandwidth. They say little where a step computes more than
it reads, from some ten streams on with a drafter.
"""
import argparse
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.study import dflash_measure, dflash_report, qwen3_shapes, spawned, workload
from eval.study.closed_loop import Stop

CPU_BATCH = 64


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; what is out of bounds ends the process with status 2 and a message with option, value and bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group('model and acceptance')
    model.add_argument('--shape', default='qwen3-8b', help=f'random weights: {", ".join(qwen3_shapes.SHAPES)}')
    model.add_argument('--acceptance', default='1,3,5,7', help='mean acceptance lengths, 1 to the drafted tokens + 1')
    model.add_argument('--draft-tokens', type=int, help="the drafter's block minus one by default")
    load = parser.add_argument_group('load')
    load.add_argument('--workload', choices=tuple(workload.WORKLOADS), default='sharegpt', help='token lengths')
    load.add_argument('--batches', default='1,8,32,64,128,256')
    load.add_argument('--engines', default=','.join(dflash_measure.ENGINES))
    load.add_argument('--repeats', type=int, default=1)
    load.add_argument('--requests', type=int, help='requests of a run')
    load.add_argument('--seconds', type=float, help='seconds of steady state of a run, then requests are given up')
    load.add_argument('--max-new', type=int, help='cut of the answers')
    load.add_argument('--seed', type=int, default=0)
    engine = parser.add_argument_group('engines')
    engine.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    engine.add_argument('--max-batch-size', type=int, help='the largest batch by default')
    engine.add_argument('--max-prefill-tokens', type=int, help='16384; 2048 on a CPU')
    engine.add_argument('--prefill-interval', type=int, default=16)
    engine.add_argument('--session-len', type=int, default=8192)
    engine.add_argument('--cache-share', type=float, default=0.5, help='of the free memory, for KV')
    engine.add_argument('--kv-blocks', type=int, help='KV pages, the same for both engines, instead of --cache-share')
    engine.add_argument('--eager', action='store_true', help='no CUDA graphs, in either engine')
    parser.add_argument('--bandwidth', type=float, default=4800, help="GB/s of the memory, for the floors; an H200's")
    parser.add_argument('--forwards', type=int, default=20,
                        help='repeats of a forward by itself for its time, outside the measured runs; 0 for none')
    parser.add_argument('--weights', type=Path, default=Path(tempfile.gettempdir()) / 'lmdeploy_focus_shapes')
    parser.add_argument('--out', type=Path, default=Path('dflash_throughput'), help='folder of the CSV and the JSON')
    options = parser.parse_args(arguments)
    _check(options, _Bounds(parser, options))
    return options


class _Bounds:
    """Refuses values of the command line."""

    def __init__(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        self.parser, self.options = parser, options

    def refuse(self, name: str, value: Any, bound: str) -> NoReturn:
        self.parser.error(f'--{name} is {value}; it must be {bound}')

    def number(self, name: str, least: float, most: float = math.inf, value: Any = None) -> None:
        """Check an option, or one value of its list; one that is not given is good."""
        value = getattr(self.options, name.replace('-', '_')) if value is None else value
        if value is not None and not least <= value <= most:
            self.refuse(name, value, f'at least {least:g}' + (f' and at most {most:g}' if most < math.inf else ''))

    def numbers(self, name: str, kind: type, least: float, most: float) -> list[Any]:
        text = getattr(self.options, name)
        try:
            values = [kind(part) for part in text.split(',')]
        except ValueError:
            self.refuse(name, repr(text), 'numbers with commas between them')
        for value in values:
            self.number(name, least, most, value)
        return list(dict.fromkeys(values))


def _check(options: argparse.Namespace, bounds: _Bounds) -> None:
    if options.shape not in qwen3_shapes.SHAPES:
        bounds.refuse('shape', options.shape, f'one of {", ".join(qwen3_shapes.SHAPES)}')
    longest = qwen3_shapes.SHAPES[options.shape].block_size - 1
    bounds.number('draft-tokens', 1, longest)
    options.draft_tokens = options.draft_tokens or longest
    options.acceptance = bounds.numbers('acceptance', float, 1, options.draft_tokens + 1)
    most = CPU_BATCH if options.device == 'cpu' else math.inf
    options.batches = bounds.numbers('batches', int, 1, most)
    bounds.number('max-batch-size', max(options.batches), most)
    options.max_batch_size = options.max_batch_size or max(options.batches)
    options.engines = options.engines.split(',')
    for name in options.engines:
        if name not in dflash_measure.ENGINES:
            bounds.refuse('engines', name, f'one of {", ".join(dflash_measure.ENGINES)}')
    for name in ('repeats', 'requests', 'max-new', 'max-prefill-tokens', 'prefill-interval', 'session-len', 'kv-blocks',
                 'bandwidth'):
        bounds.number(name, 1)
    bounds.number('seconds', 0.1)
    bounds.number('cache-share', 0.01, 0.99)
    bounds.number('forwards', 0)


def jobs(options: argparse.Namespace) -> list[dflash_measure.DFlashJob]:
    """One for each engine, with the checkpoints written."""
    target, draft = qwen3_shapes.places(options.shape, options.weights)
    if not all((folder / 'config.json').is_file() for folder in (target, draft)):
        # this process must not hold memory of the GPU
        spawned.done(qwen3_shapes.write, (options.shape, options.weights, options.device),
                     f'--shape {options.shape} could not be written to {options.weights}')
    on_cpu = options.device == 'cpu'
    # both at their best: graphs of just the batches that are measured, and of powers of two for the tails
    sizes = {2 ** power for power in range(options.max_batch_size.bit_length())}
    fields: dict[str, Any] = {
        'max_batch_size': options.max_batch_size, 'cache_max_entry_count': options.cache_share,
        'session_len': options.session_len, 'prefill_interval': options.prefill_interval,
        'max_prefill_token_num': options.max_prefill_tokens or (2048 if on_cpu else 16384),
        'dtype': 'float32' if on_cpu else 'bfloat16'}
    if options.kv_blocks is not None:
        fields['num_gpu_blocks'] = options.kv_blocks
    if not on_cpu:
        fields |= {'eager_mode': options.eager,
                   'cudagraph_capture_batch_sizes': sorted(sizes | {*options.batches, options.max_batch_size})}
    return [dflash_measure.DFlashJob(
        model=str(target), draft=str(draft) if name == 'dflash' else None, draft_tokens=options.draft_tokens,
        device=options.device, options=fields, acceptance=tuple(options.acceptance) if name == 'dflash' else (None, ),
        limit=qwen3_shapes.SHAPES[options.shape].mask_token_id, lengths=workload.WORKLOADS[options.workload],
        max_new=options.max_new, batches=options.batches, repeats=options.repeats,
        stop=Stop(options.requests, options.seconds), warm_tokens=2 * (options.draft_tokens + 1),
        forwards=options.forwards, seed=options.seed) for name in options.engines]


def main() -> None:
    """Measure and report."""
    options = parse()
    shape = qwen3_shapes.SHAPES[options.shape]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    about = {'settings': settings, 'lengths': asdict(workload.WORKLOADS[options.workload]),
             'target_gb': round(shape.target_bytes() / 1e9, 3), 'drafter_gb': round(shape.draft_bytes() / 1e9, 3)}
    bandwidth = None if options.device == 'cpu' else 1e9 * options.bandwidth
    runs: list[dict[str, Any]] = []
    for job in jobs(options):
        for run in spawned.results(dflash_measure.work, job, job.engine):
            runs.append(run)
            lines = dflash_report.summarise(runs, shape, bandwidth)
            dflash_report.write(options.out, about, runs, lines)  # after each run: the next may take long
    print(f'\nA round reads {about["target_gb"]} GB of the target and {about["drafter_gb"]} GB of the drafter, their '
          'head in both.\n')
    print(f'{dflash_report.table(lines)}\n')
    for goal in dflash_report.goals(lines):
        print(f'{goal["goal"]}: {"not measured" if goal["value"] is None else goal["value"]}, wanted {goal["bound"]}')
    print(f'\nIn full: {options.out / "dflash_throughput.csv"}, {options.out / "dflash_throughput.json"}')


if __name__ == '__main__':                # the engines are spawned
    main()
