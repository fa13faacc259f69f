"""The same engine on a GPU: the identities hold there too, and a server-like batch answers."""
import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope='module')
def cuda(pipelines):
    """Returns a function: engine options -> a pipeline on the GPU."""
    return lambda **options: pipelines(device_type='cuda', **options)


def test_keeping_everything_is_the_delayed_cache(cuda, decode, demo_items):
    """Red when eviction on the GPU changes anything but the set of rows."""
    prompts = [item.prompt for item in demo_items]
    assert decode(cuda(focus_keep=32), prompts) == decode(cuda(focus_policy='never'), prompts)


def test_graphs_change_nothing(cuda, decode, demo_items):
    """Token for token. Red when a graph reads a stale buffer, or a bucket leaves rows out."""
    prompts = [item.prompt for item in demo_items]
    assert decode(cuda(), prompts) == decode(cuda(eager_mode=True), prompts)


def test_answers_are_as_good_as_stocks(cuda, decode, demo_items):
    """Red when a step on the GPU reads or writes the wrong KV: answers would fall apart."""
    from eval.demo_models import tasks
    from lmdeploy_focus import run_stats
    right = {}
    for name, options in {'stock': {'focus': False, 'dllm_confidence_threshold': 0.9}, 'focus': {}}.items():
        pipe = cuda(**options)
        tokenizer = pipe.async_engine.tokenizer.model.model
        answers = [tokenizer.decode(ids, skip_special_tokens=True)
                   for ids in decode(pipe, [item.prompt for item in demo_items], max_new_tokens=256)]
        right[name] = sum(bool(verdict) for verdict in tasks.score(demo_items, answers))
        print(name, right[name], run_stats(pipe))
    assert right['focus'] >= right['stock'] - 6


def test_workers_of_the_mp_executor_have_the_extension(cuda, decode, demo_items):
    """Red when a spawned worker runs stock parts, or cannot unpickle ours."""
    from lmdeploy_focus import run_stats
    prompts = [item.prompt for item in demo_items[:16]]
    workers = cuda(distributed_executor_backend='mp')
    assert decode(workers, prompts) == decode(cuda(), prompts)
    assert run_stats(workers)['evicting_steps'] > 0
