"""The step on fixed buffers is the step by stages, with the torch twins and without graphs, on a CPU."""
import pytest
import torch

from lmdeploy_focus.engine.graph_runner import batch_buckets, row_buckets

OPTIONS = {
    'focus': {},
    'delayed cache': {'focus_policy': 'never'},
    'reference view, full commit': {'focus_kv_visible': 'reference', 'focus_commit': 'full'},
    'bottom 4, plain delay': {'focus_keep': 4, 'focus_selection': 'bottom', 'focus_cache': 'delayed'},
    'random, no delay': {'focus_selection': 'random', 'focus_cache': 'off'},
    'sequential': {'dllm_unmasking_strategy': 'sequential', 'dllm_denoising_steps': 16},
    'block 8': {'dllm_block_length': 8},
}


@pytest.fixture
def on_buffers(monkeypatch):
    """Makes engines use fixed buffers from now on."""
    from lmdeploy_focus.engine.model_agent import FocusModelAgent

    def switch():
        monkeypatch.setattr(FocusModelAgent, 'fixed_shapes', lambda self: True)

    return switch


@pytest.mark.parametrize('name', OPTIONS)
def test_tokens_and_rows_are_those_of_the_stages(name, pipelines, decode, demo_items, on_buffers):
    """Token for token in fp32, and row for row.

    Red when the plan, the buckets, the padding or a stale buffer of an earlier, larger batch changes a step.
    """
    from lmdeploy_focus import run_stats
    pipe = pipelines(dtype='float32', max_batch_size=16, **OPTIONS[name])
    prompts = [item.prompt for item in demo_items[:24]]  # more than a batch: sequences come and go
    before = run_stats(pipe)
    expected = decode(pipe, prompts)
    between = run_stats(pipe)
    on_buffers()
    assert decode(pipe, prompts) == expected
    after = run_stats(pipe)
    assert {key: after[key] - between[key] for key in after} == {key: between[key] - before[key] for key in before}


def test_sampled_rows_are_processed_one_by_one(pipelines, decode, demo_items, on_buffers):
    """Penalties, bans and company with other parameters go through the logits. Red when they meet padded rows."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32', max_batch_size=16)
    prompts = [item.prompt for item in demo_items[:6]]
    configs = [GenerationConfig(max_new_tokens=40, do_sample=False, bad_token_ids=[224]),
               GenerationConfig(max_new_tokens=40, do_sample=True, temperature=1.3, top_k=20, random_seed=5),
               GenerationConfig(max_new_tokens=40, do_sample=False, min_new_tokens=38)] * 2
    expected = [list(answer.token_ids) for answer in pipe(prompts, gen_config=configs)]
    on_buffers()
    assert [list(answer.token_ids) for answer in pipe(prompts, gen_config=configs)] == expected
    assert all(224 not in tokens for tokens in expected[::3])
    assert all(len(tokens) >= 38 for tokens in expected[2::3])


@pytest.mark.parametrize('largest', [1, 2, 3, 8, 17, 100, 256, 300])
def test_buckets_hold_every_size(largest):
    """Red when a batch or a row count finds no bucket, or one far larger than itself."""
    for length in (4, 16, 32, 64):
        for buckets, size in ((batch_buckets(largest), largest), (row_buckets(largest * length), largest * length)):
            assert buckets == sorted(set(buckets))
            assert buckets[-1] >= size
            for below, above in zip([0, *buckets], buckets, strict=False):
                assert above - below <= max(8, 0.5 * above)
    assert torch.tensor(row_buckets(8192)).diff().max() <= 512
