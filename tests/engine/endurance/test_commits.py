"""A finished block is committed beside the first step of the next one, wherever it ends."""
from collections import Counter

import pytest

from .streams import AT_ONCE, EXACT, GPU, LENGTH, PAGE, config, left, tokens_of

# minutes on two cores; also what `-m gpu` runs
pytestmark = pytest.mark.slow


@pytest.fixture
def ends(monkeypatch):
    """Stops that steps have told, by whether the step also committed a block."""
    from lmdeploy_focus.kernels.layout import report_columns

    from lmdeploy_focus.stages import unmask
    seen = Counter()
    original = unmask.settle

    def settle(model, view, options, tokens, scores):
        report = original(model, view, options, tokens, scores)
        stopped = report_columns(report, view.length).stopped != 0
        seen['fused'] += int((stopped & (view.plan.pending != 0)).sum())
        seen['other'] += int((stopped & (view.plan.pending == 0)).sum())
        seen['page end'] += int((stopped & (view.plan.pending != 0) & (view.plan.start.diff() > view.length)).sum())
        return report

    monkeypatch.setattr(unmask, 'settle', settle)
    return seen


@pytest.mark.parametrize('device, prompts', [('cpu', 2), pytest.param('cuda', 16, marks=GPU)])
def test_an_end_on_the_step_that_commits(engine, encoded, ends, device, prompts):
    """Caps and stop words at every place around a block's begin, in blocks that each end in one step: the answer is
    that of no cap, cut.

    Red when a sequence that stops on the step which commits the block before it loses or doubles a token, or its pages.
    """
    pipe = engine(device, eager_mode=True, **EXACT, **AT_ONCE)  # a graph would not call what counts
    before, ids = left(pipe), encoded(prompts)
    free = tokens_of(pipe, [(prompt, config(110, stop_token_ids=[])) for prompt in ids])
    requests, expected = [], []
    for prompt, text in zip(ids, free, strict=True):
        own_block = LENGTH - len(prompt) % LENGTH
        for place in (own_block - 1, own_block, own_block + 1, own_block + LENGTH - 1, own_block + LENGTH,
                      own_block + LENGTH + 1):
            requests += [(prompt, config(place, stop_token_ids=[])),
                         (prompt, config(110, stop_token_ids=[text[place]]))]
            expected += [text[:place], text[:text.index(text[place]) + 1]]
    requests, expected = zip(*[pair for pair in zip(requests, expected, strict=True)
                               if pair[0][1].max_new_tokens > 0], strict=True)
    ends.clear()
    assert tokens_of(pipe, requests) == list(expected)
    assert ends['fused'] > 2 * prompts and ends['fused'] + ends['other'] == len(requests), ends
    assert left(pipe) == before


@pytest.mark.parametrize('length', [LENGTH, PAGE])
@pytest.mark.parametrize('device, prompts', [('cpu', 3), pytest.param('cuda', 64, marks=GPU)])
def test_blocks_that_each_end_in_one_step(engine, encoded, device, prompts, length):
    """Every step begins and ends a block and commits the one before; L = 64 is a whole page, blocks of 32 end on one
    and begin on the next. Nothing is frozen before its block is over, and whole blocks are committed: whatever the
    cache, answers are the same, and stock's, which commits in a step of its own (on a CPU: its GPU kernels round fp32).

    Red when a commit rides along with the wrong ids, pages or visible keys, or is lost where blocks follow at once.
    """
    from lmdeploy_focus import run_stats
    requests = [(ids, config(150, stop_token_ids=[])) for ids in encoded(prompts)]
    engines = [{'focus_cache': 'off'}, {'focus_commit': 'full'}, {'focus_cache': 'delayed', 'focus_commit': 'full'}]
    pipes = [engine(device, dllm_block_length=length, **EXACT, **AT_ONCE, **options)
             for options in engines[:2 if device == 'cpu' else 3]]
    before = run_stats(pipes[0])
    first, *others = [tokens_of(pipe, requests) for pipe in pipes]
    spent = {name: value - before[name] for name, value in run_stats(pipes[0]).items()}
    assert spent['steps'] <= spent['blocks'] + prompts  # a last block may end at its cap
    assert spent['steps'] >= prompts * (150 // length)
    assert all(other == first for other in others)
    assert [len(tokens) for tokens in first] == [150] * prompts
    if device == 'cpu':
        stock = engine(device, dllm_block_length=length, focus=False, dllm_confidence_threshold=1e-9)
        assert tokens_of(stock, requests) == first


@pytest.mark.parametrize('options', [{}, AT_ONCE, {**AT_ONCE, 'dllm_block_length': PAGE}],
                         ids=['focus', 'blocks at once', 'a page at once'])
@pytest.mark.parametrize('device, prompts', [('cpu', 2), pytest.param('cuda', 64, marks=GPU)])
def test_what_was_committed_is_what_a_prefill_leaves(engine, encoded, device, prompts, options):
    """An answer cut at the end of a block and asked for again with the text so far as its prompt goes on as if it had
    not been cut, to the last token.

    Red when the KV that commits beside another block's step is not that of a prefill: a row sees the new block, misses
    one of its own, or lies on another page.
    """
    pipe = engine(device, **EXACT, **options, focus_commit='full')
    length = options.get('dllm_block_length', LENGTH)
    ids, more = encoded(prompts), 2 * length
    first = [3 * length - len(prompt) % length for prompt in ids]
    whole = tokens_of(pipe, [(prompt, config(cut + more, stop_token_ids=[]))
                             for prompt, cut in zip(ids, first, strict=True)])
    again = tokens_of(pipe, [(prompt + text[:cut], config(more, stop_token_ids=[]))
                             for prompt, text, cut in zip(ids, whole, first, strict=True)])
    assert again == [text[cut:] for text, cut in zip(whole, first, strict=True)]
