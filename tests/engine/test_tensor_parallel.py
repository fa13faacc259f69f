"""Two GPUs that share every layer's heads pick the same rows, and the rows that one GPU picks."""
import pytest
import torch
from lmdeploy_focus.kernels.layout import state_columns

from . import watched

# what runs without a GPU is the watch itself; minutes on two cores
pytestmark = pytest.mark.slow

PROMPTS, LIMIT, LENGTH = 24, 96, 32
# Rounding of bf16 in the two sums that a layer's output is made of, against the spread of a step's deltas.
NEAR = 0.1


@pytest.fixture(scope='module')
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two CUDA GPUs')


@pytest.fixture
def decode_watched(monkeypatch, tmp_path):
    """Returns a function: name, prompts, engine options -> answers, and the steps of each process.

    Prompts are asked one by one where `together` is False.
    """
    from lmdeploy import GenerationConfig, pipeline

    from lmdeploy_focus import FocusEngineConfig

    from .conftest import SDAR
    plain = FocusEngineConfig.focus_params

    def run(name, prompts, together=False, **options):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(FocusEngineConfig, 'focus_params',
                            lambda self: watched.WatchedParams.of(plain(self), folder))
        pipe = pipeline(SDAR, backend_config=FocusEngineConfig(
            max_batch_size=64, num_gpu_blocks=512, session_len=1024, distributed_executor_backend='mp',
            eager_mode=True, **options), log_level='ERROR')
        config = GenerationConfig(max_new_tokens=LIMIT, do_sample=False)
        asked = [prompts] if together else [[prompt] for prompt in prompts]
        answers = [list(answer.token_ids) for some in asked for answer in pipe(some, gen_config=config)]
        pipe.close()
        return answers, watched.steps_of(folder)

    return run


@pytest.fixture(scope='module')
def prompts():
    from eval.demo_models import tasks
    return [item.prompt for item in tasks.eval_set(None, PROMPTS // len(tasks.TASKS))]


@pytest.mark.gpu
def test_ranks_pick_the_same_rows(two_gpus, decode_watched, prompts):
    """At every step of a batch, bit for bit: deltas, kept rows, and the states before the step.

    Red when a rank adds the heads in another order, ranks by its own heads alone, or draws another token.
    """
    _, ranks = decode_watched('two', prompts, together=True, tp=2)
    assert len(ranks) == 2 and len(ranks[0]) == len(ranks[1]) > 20
    for number, (one, other) in enumerate(zip(*ranks, strict=True)):
        assert one['came'] == other['came']
        for name in ('table', 'delta', 'entered', 'kept', 'pending'):
            assert torch.equal(one[name], other[name]), (number, name)
    assert any(bool((step['kept'] != step['entered']).any()) for step in ranks[0])


@pytest.mark.gpu
def test_two_gpus_pick_what_one_picks(two_gpus, decode_watched, prompts):
    """Prompts one by one, as long as both are in the same state: at least 99% of the sets are equal, and where they
    are not, the deltas are, but for rounding.

    Red when the gathered importance is not that of all heads, or a head counts twice.
    """
    _, (one_gpu,) = decode_watched('one', prompts, tp=1)
    _, (two_gpu, _) = decode_watched('two', prompts, tp=2)
    same, missed, apart = compare(one_gpu, two_gpu)
    print(f'{same} sets equal, {len(missed)} not, deltas apart by at most {apart:.4f} of their spread')
    assert same > 10 * PROMPTS
    assert len(missed) <= 0.01 * (same + len(missed))
    assert all(distance < NEAR for distance in missed)


@pytest.mark.gpu
def test_graphs_on_two_gpus(two_gpus, pipelines, decode, demo_items):
    """Collectives inside CUDA graphs: as many right answers as one GPU gives, but for near-ties.

    Red when a captured gather or all-reduce reads a buffer of another step.
    """
    from eval.demo_models import tasks
    right = {}
    for tp in (1, 2):
        pipe = pipelines(device_type='cuda', num_gpu_blocks=1024, tp=tp, distributed_executor_backend='mp')
        tokenizer = pipe.async_engine.tokenizer.model.model
        answers = decode(pipe, [item.prompt for item in demo_items], max_new_tokens=256)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        right[tp] = sum(bool(verdict) for verdict in tasks.score(demo_items, texts))
    print(right)
    assert right[1] > len(demo_items) // 2 and abs(right[1] - right[2]) <= 6


def compare(one, other):
    """Of two runs of the same prompts: equal sets; for unequal ones how far the deltas are apart, by their spread; and
    the largest such distance of all."""
    same, missed, largest = 0, [], 0.0
    for came in sorted({step['came'] for step in one}):
        pairs = zip([step for step in one if step['came'] == came], [step for step in other if step['came'] == came],
                    strict=False)
        for mine, theirs in pairs:
            if not torch.equal(mine['table'], theirs['table']):
                break
            masked = int((state_columns(mine['table'], LENGTH).masked[0] & mine['entered'][0]).bitwise_and(
                (1 << LENGTH) - 1).item()).bit_count()
            deltas = mine['delta'][0, :masked], theirs['delta'][0, :masked]
            distance = 0.0
            if masked > 1:
                distance = float((deltas[0] - deltas[1]).abs().max() / deltas[0].std().clamp_min(1e-6))
            largest = max(largest, distance)
            if torch.equal(mine['kept'], theirs['kept']):
                same += 1
            else:
                missed.append(distance)
    return same, missed, largest


def test_the_watch_sees_what_an_engine_decides(pipelines, decode, prompts, tmp_path, monkeypatch):
    """On a CPU, in this process: a step each, rows that leave, and a run that is compared with itself has no miss.

    Red when the watch of the tests above sees nothing, or `compare` finds equal what is not.
    """
    from lmdeploy_focus.stages import select
    from lmdeploy_focus.stages.state import FocusState
    monkeypatch.setattr(select, 'plan', select.plan)
    monkeypatch.setattr(FocusState, 'append', FocusState.append)
    monkeypatch.setattr(select, 'watched', False, raising=False)
    watched.watch(tmp_path)
    pipe = pipelines(dtype='float32')
    for prompt in prompts[:3]:
        assert decode(pipe, [prompt], max_new_tokens=40)[0]
    (steps,) = watched.steps_of(tmp_path)
    assert {step['came'] for step in steps} == {1, 2, 3}
    assert any(bool((step['kept'] != step['entered']).any()) for step in steps)
    same, missed, apart = compare(steps, steps)
    assert same == len(steps) > 10 and not missed and apart == 0.0
    others = [{**step, 'kept': step['kept'] ^ 1, 'delta': step['delta'] * 1.5} for step in steps]
    same, missed, apart = compare(steps, others)
    assert same == 0 and len(missed) == len(steps) and apart > NEAR
