"""Long prompts, shared and lost pages, and the end of the context, with a drafter; all as without one."""

from lmdeploy_focus import run_stats

PREFIX = 'Anna reads 12 pages a day. '
SAMPLED = {'do_sample': True, 'random_seed': 5, 'temperature': 1.0, 'repetition_penalty': 1.2}


def test_chunked_prefill(start, demo, pipes, prompts, answer):
    """Red when a chunk's features are not taken over into the drafter's cache: drafts then are accepted less often."""
    texts = [PREFIX * 20 + text for text in prompts[:4]]
    plain, whole = pipes()
    before = run_stats(whole)
    expected = answer(plain, texts)
    assert answer(whole, texts) == expected
    steps = run_stats(whole)['verify_steps'] - before['verify_steps']
    with start(demo / 'ar', demo / 'dflash', max_prefill_token_num=64) as chunked:
        assert answer(chunked, texts) == expected
        assert run_stats(chunked)['verify_steps'] == steps


def test_prefix_caching(start, demo, pipes, prompts, answer):
    """Red when a shared page has no context of the drafter's: the second turn finds pages that hold the end of the
    first answer, and must take as many steps as without caching."""
    plain, whole = pipes()
    with start(demo / 'ar', demo / 'dflash', enable_prefix_caching=True) as cached:
        scheduler = cached.async_engine.engine.scheduler
        texts = [PREFIX * 8 + text for text in prompts[:4]]
        for _ in range(2):
            before, whole_before = run_stats(cached)['verify_steps'], run_stats(whole)['verify_steps']
            outs = answer(plain, texts)
            assert answer(cached, texts) == answer(whole, texts) == outs
            assert run_stats(cached)['verify_steps'] - before == run_stats(whole)['verify_steps'] - whole_before
            tokenizer = cached.async_engine.tokenizer
            texts = [text + tokenizer.decode(ids) + ' So' for text, (ids, _, _) in zip(texts, outs, strict=True)]
        assert scheduler.block_trie.stats.hit_rate() > 0.3


def test_preempted_sequences(start, demo, prompts, answer, preempted):
    """Red when a sequence that lost its pages in the middle gets another history, random stream or context, or when so
    much room is kept ahead that 16 pages of 16 tokens never admit one."""
    options = {'block_size': 16, 'kernel_block_size': 16, 'session_len': 224}
    texts = [text for text in prompts if len(text) < 160][:5]
    with start(demo / 'ar', None, **options) as plain, \
            start(demo / 'ar', demo / 'dflash', num_gpu_blocks=16, **options) as dflash:
        lost = preempted(dflash)
        for request in ({}, SAMPLED):
            request = {'max_new_tokens': 100, 'ignore_eos': True, **request}
            assert answer(dflash, texts, **request) == answer(plain, texts, **request)
        assert max(lost) > 16


def test_the_end_of_the_context(start, demo, prompts, answer):
    """Red when a block that reaches over the end of the context is verified or drafted outside of the sequence's
    pages."""
    options = {'session_len': 112, 'block_size': 16, 'kernel_block_size': 16}
    texts = [text for text in prompts if len(text) < 200][:6]
    request = {'max_new_tokens': 500, 'ignore_eos': True}
    with start(demo / 'ar', None, **options) as plain, start(demo / 'ar', demo / 'dflash', **options) as dflash:
        expected = answer(plain, texts, **request)
        assert answer(dflash, texts, **request) == expected
    assert {reason for _, reason, _ in expected} == {'length'}
