"""Too few pages: sequences are sent back and come again."""

import pytest

from .streams import AT_ONCE, EXACT, GPU, config, left, tokens_of

# minutes on two cores; also what `-m gpu` runs
pytestmark = pytest.mark.slow


@pytest.fixture
def preempted(monkeypatch):
    """Of each running sequence that was preempted, tokens of its block that are decided already."""
    from lmdeploy.pytorch.messages import MessageStatus
    from lmdeploy.pytorch.paging.scheduler import Scheduler
    seen = []
    original = Scheduler.preempt_seqs

    def preempt_seqs(self, seqs):
        seqs = list(seqs)
        seen.extend(sequence.num_valid_ids - max(sequence.num_history_ids, sequence.output_start_pos)
                    for sequence in seqs if sequence.status == MessageStatus.RUNNING)
        return original(self, seqs)

    monkeypatch.setattr(Scheduler, 'preempt_seqs', preempt_seqs)
    return seen


@pytest.mark.parametrize('device, options, count, limit, pages', [
    ('cpu', AT_ONCE, 8, 160, 17), pytest.param('cpu', {}, 8, 160, 17, marks=pytest.mark.slow),
    pytest.param('cuda', AT_ONCE, 128, 400, 150, marks=GPU), pytest.param('cuda', {}, 128, 400, 70, marks=GPU)])
def test_preemption_changes_nothing(engine, encoded, preempted, device, options, count, limit, pages):
    """KV for a third of the demand, or less where answers seldom end at the same time: sequences are sent back at the
    end of a block, and begin the next one after a new prefill. With whole commits, whose KV is that of a prefill, every
    token is the same as with ample memory.

    Red when a preempted sequence comes back with stale state or half a block, or its commit is done twice or never.
    """
    options = {**EXACT, **options, 'focus_commit': 'full'}
    # short prompts: pages are needed while answers grow
    requests = [(ids[:40], config(limit, stop_token_ids=[])) for ids in encoded(count)]
    scarce = engine(device, num_gpu_blocks=pages, **options)
    before = left(scarce)
    answers = tokens_of(scarce, requests)
    print(f'{len(preempted)} sequences were sent back')
    assert len(preempted) >= count // 8, 'the test means nothing unless sequences are preempted'
    assert max(preempted) <= 0, 'sequences were sent back amid a block'
    assert left(scarce) == before
    assert answers == tokens_of(engine(device, **options), requests)


@pytest.mark.gpu
@pytest.mark.parametrize('device', ['cuda'])
def test_preemption_costs_no_answer(engine, decode, preempted, device):
    """The default commit leaves out what was cached, so that a preempted sequence goes on with another KV than it had:
    no page is lost, and about as many answers are right as with ample memory. On a CPU: test_fresh_state.py.

    Red when a sequence that comes back reads KV of another one, or loses its place in the text.
    """
    from eval.demo_models import tasks
    items = tasks.eval_set(None, 32)
    scarce, right = engine(device, num_gpu_blocks=70), {}
    before = left(scarce)
    for name, pipe in {'scarce': scarce, 'ample': engine(device)}.items():
        answers = decode(pipe, [item.prompt for item in items], max_new_tokens=256)
        tokenizer = pipe.async_engine.tokenizer.model.model
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        right[name] = sum(bool(verdict) for verdict in tasks.score(items, texts))
    print(right, f'{len(preempted)} sequences were sent back')
    assert len(preempted) > 8, 'the test means nothing unless sequences are preempted'
    assert left(scarce) == before
    # near-ties go another way in some answers, to the better or the worse
    assert right['scarce'] >= right['ample'] - 0.06 * len(items)
