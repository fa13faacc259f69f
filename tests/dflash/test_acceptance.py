"""What a pipeline's responses and `lmdeploy chat` tell of drafted tokens."""

import pytest
from lmdeploy import GenerationConfig

from lmdeploy_focus import run_stats
from lmdeploy_focus.dflash.acceptance import Acceptance

from .records import GREEDY, QUESTION, delta, inside_a_run


def test_each_response_has_the_counts_of_its_request(pipes, prompts, records):
    """Red when a batch's rows are mixed up, tokens after a stop or a cap count, the stop token does not, or an output
    that nobody fetched takes its steps along; each is seen against the drafts, and the sum against `run_stats`."""
    _, pipe = pipes()
    pipe(prompts[:8], gen_config=GenerationConfig(**GREEDY), do_preprocess=False)
    place, stop = inside_a_run(records)
    sampled = {'do_sample': True, 'random_seed': 5, 'max_new_tokens': 48}
    options = [{}, {'max_new_tokens': 1}, {'max_new_tokens': 5}, {'max_new_tokens': 17}, sampled,
               {**sampled, 'temperature': 1.3, 'repetition_penalty': 1.2}, {'stop_token_ids': [stop]},
               {'ignore_eos': True, 'max_new_tokens': 64}]
    texts = [prompts[place] if 'stop_token_ids' in one else text for one, text in zip(options, prompts, strict=False)]
    sessions, before = [pipe.session() for _ in options], run_stats(pipe)
    ids = [session.session_id for session in sessions]
    outs = pipe(texts, sessions=sessions, do_preprocess=False,
                gen_config=[GenerationConfig(**{**GREEDY, **one}) for one in options])
    assert [out.acceptance for out in outs] == [records.acceptance(session) for session in ids]
    total = sum((out.acceptance for out in outs), Acceptance.none(15))
    stats = delta(pipe, before)
    assert (total.verify_steps, total.drafted_tokens, total.accepted_tokens) == \
        (stats['verify_steps'], stats['drafted_tokens'], stats['accepted_tokens'])
    assert outs[1].acceptance == Acceptance.none(15)
    stopped, session = outs[6], ids[6]
    begin, draft = next(one for one in records.verified[session] if stop in one[1] and one[0] <= len(stopped.token_ids))
    assert stopped.finish_reason == 'stop'
    assert len(stopped.token_ids) == begin + 1
    assert draft[1] == stop
    assert stopped.acceptance.steps_by_accepted[2] >= 1
    assert 0 < total.accepted_tokens < total.drafted_tokens == total.accepted_tokens + total.rejected_tokens


def test_streams_turns_and_cancelled_requests(pipes, prompts, records):
    """Red when a stream ends with other counts than the whole answer has, a turn of a conversation starts with the
    counts of the turn before, or a cancelled request counts tokens that it was not given."""
    _, pipe = pipes()
    config = GenerationConfig(**GREEDY)
    whole = pipe(prompts[:1], gen_config=config, do_preprocess=False)[0].acceptance
    *_, last = pipe.stream_infer(prompts[:1], gen_config=config, do_preprocess=False)
    assert last.acceptance == whole
    conversation = pipe.session()
    for question in (QUESTION, 'And if he eats 2 of them?'):
        before = run_stats(pipe)
        pipe.chat(question, session=conversation, gen_config=config)
        told, stats = conversation.response.acceptance, delta(pipe, before)
        assert (told.verify_steps, told.accepted_tokens) == (stats['verify_steps'], stats['accepted_tokens'])
        assert told.verify_steps > 0
    session, tokens = pipe.session(), []
    number = session.session_id
    long = GenerationConfig(do_sample=False, ignore_eos=True, max_new_tokens=600)
    for response in pipe.stream_infer(prompts[:1], sessions=session, gen_config=long, do_preprocess=False):
        tokens += response.token_ids
        if len(tokens) > 20 and response.finish_reason is None:
            session.abort()
    assert response.finish_reason == 'abort'
    assert len(tokens) < 600
    assert response.acceptance == records.acceptance(number, len(tokens))


def test_requests_that_lose_their_pages(start, demo, prompts, records, preempted):
    """Red when the counts start anew after a preemption, or a draft counts that was lost with the pages."""
    options = {'block_size': 16, 'kernel_block_size': 16, 'session_len': 224, 'num_gpu_blocks': 16}
    texts = [text for text in prompts if len(text) < 160][:5]
    with start(demo / 'ar', demo / 'dflash', **options) as pipe:
        lost = preempted(pipe)
        sessions = [pipe.session() for _ in texts]
        ids = [session.session_id for session in sessions]
        outs = pipe(texts, sessions=sessions, do_preprocess=False,
                    gen_config=GenerationConfig(do_sample=False, ignore_eos=True, max_new_tokens=100))
        assert max(lost) > 16
        assert [out.acceptance for out in outs] == [records.acceptance(session) for session in ids]
        assert sum(out.acceptance.accepted_tokens for out in outs) == run_stats(pipe)['accepted_tokens']


@pytest.mark.parametrize('drafting', [True, False])
def test_chat_prints_a_line_after_each_answer(drafting, pipes, monkeypatch, capsys):
    """Red when the line is missing, comes before the answer, has the sum of all answers, or is printed without a
    drafter."""
    from lmdeploy.cli import chat

    from lmdeploy_focus import patches
    pipe = pipes()[drafting]

    class Kept:
        """A pipeline that outlives the command."""

        def __init__(self):
            self.async_engine, self.stream_infer, self.session = pipe.async_engine, pipe.stream_infer, pipe.session

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    lines = iter([QUESTION, '', 'end', '', QUESTION, '', 'exit', ''])
    patches.undo(patches.rows('boundary'))
    monkeypatch.setattr(chat, 'pipeline', lambda *args, **kwargs: Kept())
    patches.apply(patches.rows('boundary'))
    try:
        monkeypatch.setattr('builtins.input', lambda: next(lines))
        before = run_stats(pipe)
        chat.main('model', 'pytorch', max_new_tokens=48, top_k=1)
    finally:
        patches.undo(patches.rows('boundary'))
    printed = capsys.readouterr().out
    answers = printed.split('double enter to end input >>> ')
    told = [line for line in printed.splitlines() if 'drafted' in line]
    if not drafting:
        assert not told
        return
    stats = {name: value // 2 for name, value in delta(pipe, before).items()}
    accepted, drafted, steps = stats['accepted_tokens'], stats['drafted_tokens'], stats['verify_steps']
    assert told == 2 * [f'[acceptance length {1 + accepted / steps:.2f}: {accepted} of {drafted} drafted tokens '
                        f'accepted in {steps} steps]']
    assert [answer.strip().splitlines()[-1] for answer in (answers[1], answers[3])] == told
