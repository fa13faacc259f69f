"""Engine-level throughput of stock LMDeploy, of the delayed cache and of FOCUS, in a closed loop.

    python eval/throughput.py --shape sdar-8b --trace demo --batches 1,8,32,64,128,256 --seconds 15
    python eval/throughput.py --model JetLM/SDAR-8B-Chat-b32 --dataset ShareGPT.json
    python eval/throughput.py --engines focus --batches 64,128,256 --seconds 10 --profile profiles --overhead
    python eval/throughput.py --shape tiny --device cpu --batches 1,2 --requests 6        (no GPU: does it run?)
    python eval/throughput.py --record

`batch` streams each send their next request when one ends. Every engine has a process of its own, one after the other,
with the same options and the same requests. Figures are those of steady state: from the moment when every stream has
tokens to the moment when a stream finds no next request.

What is called stock is stock LMDeploy. It has no model of LLaDA2: there it is our own model with focus off, under
LMDeploy's own engine, and the report says so.

Without a checkpoint (--model) a published shape gets random weights. They decode nothing sensible, so decisions are
replayed: masks, importances and decoded sets of --trace. Stock replays the dense recording, the delayed cache its own,
focus the one with its own lower threshold; the real selection chooses the rows.
"""
import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.study import measure, overhead, report, shapes, spawned, traces, workload
from eval.study.closed_loop import Stop
from eval.study.published import published

# codes of the stock replay lie above the prompts' tokens and below the mask token
CODE_SHARE = 0.6


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group('model and decisions')
    source.add_argument('--model', help='checkpoint; decides by itself, nothing is replayed')
    source.add_argument('--shape', default='sdar-8b', help=f'random weights: {", ".join(shapes.SHAPES)}')
    source.add_argument('--block-length', type=int, default=32)
    source.add_argument('--trace', choices=('demo', 'published'), default='demo')
    source.add_argument('--record', action='store_true', help='record the demo trace anew (CPU, minutes), then end')
    source.add_argument('--record-prompts', type=int, default=50, help='of each of five tasks')
    load = parser.add_argument_group('load')
    load.add_argument('--workload', choices=tuple(workload.WORKLOADS), default='sharegpt',
                      help='token lengths, and the line of Table 5 for --trace published')
    load.add_argument('--dataset', type=Path, help='real prompts, JSON or JSON lines')
    load.add_argument('--tokenizer', help='of --dataset; the model by default')
    load.add_argument('--batches', default='1,8,32,64,128,256')
    load.add_argument('--engines', default=','.join(measure.ENGINES))
    load.add_argument('--repeats', type=int, default=1)
    load.add_argument('--requests', type=int, help='requests of a run')
    load.add_argument('--seconds', type=float, help='seconds of steady state of a run, then requests are given up')
    load.add_argument('--sampled', action='store_true', help='measure with sampling too')
    load.add_argument('--max-new', type=int, help='cut of the answers')
    load.add_argument('--seed', type=int, default=0)
    engine = parser.add_argument_group('engines')
    engine.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    engine.add_argument('--focus-policy', choices=('auto', 'always'),
                        help='of the focus engine: auto with --model; always where decisions are replayed, as a '
                             'recording is of one mode')
    engine.add_argument('--max-batch-size', type=int, help='the largest batch by default')
    engine.add_argument('--max-prefill-tokens', type=int, help='16384; 2048 on a CPU')
    engine.add_argument('--prefill-interval', type=int, default=16)
    engine.add_argument('--session-len', type=int, default=8192)
    engine.add_argument('--cache-share', type=float, default=0.5, help='of the free memory, for KV')
    engine.add_argument('--kv-blocks', type=int, help='KV pages, the same for every engine, instead of --cache-share')
    engine.add_argument('--eager', action='store_true', help='no CUDA graphs, in any engine')
    parser.add_argument('--weights', type=Path, default=Path(tempfile.gettempdir()) / 'lmdeploy_focus_shapes')
    parser.add_argument('--out', type=Path, default=Path('throughput'), help='folder of the CSV and the JSON')
    parser.add_argument('--profile', type=Path, metavar='DIR', help='profile some steady steps of the focus engine')
    parser.add_argument('--overhead', action='store_true',
                        help='where the profiled steps spend their time, by stage (paper, Appendix E.5)')
    options = parser.parse_args(arguments)
    options.batches = [int(batch) for batch in options.batches.split(',')]
    options.engines = options.engines.split(',')
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for name in options.engines:
        if name not in measure.ENGINES:
            raise SystemExit(f'--engines has {name}; they are {", ".join(measure.ENGINES)}')
    if min(options.batches) < 1 or options.repeats < 1:
        raise SystemExit('--batches and --repeats must be at least 1')
    if options.overhead and (options.profile is None or 'focus' not in options.engines or options.device == 'cpu'):
        raise SystemExit('--overhead needs --profile DIR, focus among --engines, and a GPU')
    if options.model is None and options.focus_policy == 'auto':
        raise SystemExit('--focus-policy is auto; without --model it must be always: a recording is of one mode')
    options.focus_policy = options.focus_policy or ('always' if options.model is None else 'auto')
    if options.model is None and options.trace == 'demo' and options.block_length != 32:
        raise SystemExit(f'--trace demo has blocks of 32, --block-length is {options.block_length}')


def recordings(options: argparse.Namespace) -> tuple[dict[str, traces.Recording] | None, dict[str, Any]]:
    """What is replayed, by mode, and what the output says of it."""
    if options.model is not None:
        return None, {'decisions': 'of the model'}
    if options.trace == 'demo':
        found, note = traces.load(traces.DEMO)
        means = {mode: recording.means() for mode, recording in found.items()}
        return found, {'decisions': 'replayed, demo trace', 'means': means, 'note': note}
    found, note = published(options.workload, options.block_length)
    return found, {'decisions': 'replayed, published trace', 'means': note}


def jobs(options: argparse.Namespace, found: dict[str, traces.Recording] | None) -> list[measure.Job]:
    """One for each engine, with the checkpoint written."""
    model, limit = options.model, 100000
    if model is None:
        model, shape = str(written(options)), shapes.SHAPES[options.shape]
        limit = int(shape.vocab_size * CODE_SHARE)
        codes = max(len(recording.decoded) for recording in (found or {}).values()) + 2 * options.block_length
        if limit + codes > shape.mask_token_id:
            raise SystemExit(f'--trace has {codes} steps, more than --shape {options.shape} has tokens to spare')
    prompts = None
    if options.dataset is not None:
        prompts = workload.read_prompts(options.dataset, options.tokenizer or model)
    on_cpu, largest = options.device == 'cpu', options.max_batch_size or max(options.batches)
    # stock at its best: graphs of just the batches that are measured, and of powers of two for the tails
    captured = sorted({2 ** power for power in range(largest.bit_length())} | {*options.batches, largest})
    fields: dict[str, Any] = {
        'max_batch_size': largest, 'cache_max_entry_count': options.cache_share, 'session_len': options.session_len,
        'max_prefill_token_num': options.max_prefill_tokens or (2048 if on_cpu else 16384),
        'prefill_interval': options.prefill_interval}
    if options.kv_blocks is not None:
        fields['num_gpu_blocks'] = options.kv_blocks
    if not on_cpu:
        fields |= {'dtype': 'bfloat16', 'eager_mode': options.eager, 'cudagraph_capture_batch_sizes': captured}
    mode = measure.ENGINES
    return [measure.Job(engine=name, model=model, device=options.device, length=options.block_length, options=fields,
                        focus_options={'focus_policy': options.focus_policy} if name == 'focus' else {},
                        recording=found[mode[name]] if found else None, code=limit,
                        lengths=workload.WORKLOADS[options.workload], max_new=options.max_new, prompts=prompts,
                        batches=options.batches, repeats=options.repeats, stop=Stop(options.requests, options.seconds),
                        requests_per_stream=3, warm_tokens=options.block_length,
                        sampled=options.sampled and name == 'focus',
                        profile=options.profile if name == 'focus' else None, seed=options.seed)
            for name in options.engines]


def stock(options: argparse.Namespace) -> str:
    """What the engine called stock runs."""
    if options.model is None:
        return shapes.stock_is(shapes.SHAPES[options.shape].model_type)
    from transformers import PretrainedConfig
    return shapes.stock_is(PretrainedConfig.get_config_dict(options.model)[0].get('model_type'))


def written(options: argparse.Namespace) -> Path:
    """The checkpoint of --shape; a process of its own writes it, as this one must not hold memory of the GPU.

    Raises:
        ValueError: there is no such shape.
        SystemExit: its process failed.
    """
    target = shapes.place(options.shape, options.weights, options.block_length)
    if not (target / 'config.json').is_file():
        arguments = (options.shape, options.weights, options.block_length, options.device)
        spawned.done(shapes.write, arguments, f'--shape {options.shape} could not be written to {target}')
    return target


def main() -> None:
    """Record, or measure and report."""
    options = parse()
    if options.record:
        import torch

        from eval.study.record import record
        torch.set_num_threads(1)
        record(traces.DEMO, options.record_prompts)
        return
    found, about = recordings(options)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    about |= {'settings': settings, 'lengths': asdict(workload.WORKLOADS[options.workload])}
    prepared = jobs(options, found)
    about['stock'] = stock(options)
    runs: list[dict[str, Any]] = []
    for job in prepared:
        runs += spawned.results(measure.work, job, job.engine)
        if options.overhead and job.profile is not None:
            about['overhead'] = overhead.of_files([job.profile / f'focus-{batch}.json' for batch in options.batches])
        lines = report.summarise(runs)
        # after each engine: the next may take long
        report.write(options.out, 'throughput', lines, {'about': about, 'lines': lines, 'runs': runs})
    print(f'\nDecisions: {about["decisions"]}. stock: {about["stock"]}.')
    for mode, means in about.get('means', {}).items():
        print(f'  {mode}: {means["tokens_per_step"]} tokens a step, {means["rows_per_token"]} rows per decoded token')
    if options.overhead:
        print(f'\n{overhead.table(about["overhead"])}')
    print(f'\n{report.table(lines)}\n\nIn full: {options.out / "throughput.csv"}, {options.out / "throughput.json"}')


if __name__ == '__main__':                # the engines are spawned
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from None
