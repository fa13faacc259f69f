"""The engine with a drafter against the same engine without: the very same tokens, whatever is asked for."""
import pytest

from lmdeploy_focus import run_stats

SAMPLED = {'do_sample': True, 'random_seed': 5, 'temperature': 1.0}
REQUESTS = {
    'seeded': SAMPLED,
    'all tokens': {**SAMPLED, 'temperature': 1.3, 'top_k': 0},
    'filters': {**SAMPLED, 'top_k': 20, 'top_p': 0.9, 'min_p': 0.05},
    'repetition penalty': {**SAMPLED, 'repetition_penalty': 1.3},
    'bad words': {'bad_token_ids': list(range(10, 60))},
    'greedy, ignore_eos': {'ignore_eos': True, 'max_new_tokens': 80},
}


def counted(pipe, work):
    """Result of `work`, and what `run_stats` counted meanwhile."""
    before = run_stats(pipe)
    result = work()
    return result, {name: value - before[name] for name, value in run_stats(pipe).items()}


def test_greedy_is_plain_decoding(pipes, prompts, answer):
    """Red when a verified token is not the target's, rejected tokens leave a trace in a cache, or company changes an
    answer; or when nothing is drafted. The counts are checked against the tokens."""
    plain, dflash = pipes()
    expected = answer(plain, prompts)
    got, stats = counted(dflash, lambda: answer(dflash, prompts))
    assert got == expected
    alone, of_alone = counted(dflash, lambda: [answer(dflash, [text])[0] for text in prompts])
    assert alone == expected
    assert of_alone == stats
    assert stats['drafted_tokens'] == 15 * stats['verify_steps'] > 0
    # One token of an answer comes from its prefill, and each verification adds its own after the accepted ones, unless
    # the answer ends before it. An answer that stopped by itself has a stop token beside `token_ids`.
    emitted = sum(len(ids) - 1 + (reason == 'stop') for ids, reason, _ in got)
    assert emitted - len(got) <= stats['accepted_tokens'] + stats['verify_steps'] - len(got) <= emitted
    assert stats['accepted_tokens'] > 3 * stats['verify_steps']


def test_as_many_steps_as_the_reference(pipes, prompts, answer, demo):
    """Red when drafting is worse than the plain torch decode's: features, positions, mask or block are not what the
    drafter was trained with. The acceptance length is the tokens of the steps by the steps; it may differ by 2%."""
    from eval.demo_models.checkpoint import load_decoder, load_draft
    from eval.demo_models.reference_dflash import decode_dflash
    from eval.demo_models.tokenizer import load_tokenizer
    _, dflash = pipes()
    tokenizer, chosen = load_tokenizer(demo / 'ar'), prompts[2::8]
    reference = decode_dflash(load_decoder(demo / 'ar'), load_draft(demo / 'dflash'),
                              [tokenizer.encode(text, add_special_tokens=False).ids for text in chosen], 64)
    got, stats = counted(dflash, lambda: answer(dflash, chosen))
    assert [ids for ids, _, _ in got] == [drafted.tokens for drafted in reference]
    assert stats['verify_steps'] == pytest.approx(sum(drafted.steps for drafted in reference), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('batch', [1, 32])
def test_greedy_on_many_prompts(start, answer, demo, batch):
    """256 prompts of all five tasks, up to 384 tokens. Red as the two above."""
    from eval.demo_models.checkpoint import load_decoder, load_draft
    from eval.demo_models.evaluate import short_questions
    from eval.demo_models.reference_dflash import decode_dflash
    from eval.demo_models.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(demo / 'ar')
    ids = short_questions(tokenizer, 52).prompts[:256]
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in ids]
    with start(demo / 'ar', None, max_batch_size=batch) as plain, \
            start(demo / 'ar', demo / 'dflash', max_batch_size=batch) as dflash:
        expected = answer(plain, texts, max_new_tokens=384)
        got, stats = counted(dflash, lambda: answer(dflash, texts, max_new_tokens=384))
    assert got == expected
    # The slow reference reads prompts of like length at once, so that little is padding.
    order, steps = sorted(range(len(ids)), key=lambda index: len(ids[index])), 0
    target, draft = load_decoder(demo / 'ar'), load_draft(demo / 'dflash')
    for first in range(0, 64, 8):
        chosen = order[first * 4:first * 4 + 32:4]
        steps += sum(drafted.steps for drafted in decode_dflash(target, draft, [ids[i] for i in chosen], 384))
    assert stats['drafted_tokens'] == 15 * stats['verify_steps'] > 0
    chosen_all = [order[first * 4 + offset] for first in range(0, 64, 8) for offset in range(0, 32, 4)]
    with start(demo / 'ar', demo / 'dflash', max_batch_size=batch) as dflash:
        _, of_chosen = counted(dflash, lambda: answer(dflash, [texts[i] for i in chosen_all], max_new_tokens=384))
    assert of_chosen['verify_steps'] == pytest.approx(steps, rel=0.02)


@pytest.mark.parametrize('name', REQUESTS)
def test_a_request_is_answered_as_without_a_drafter(name, pipes, prompts, answer):
    """Red when an option is passed over, or counts tokens otherwise, at a drafted position; seeded requests need the
    same place in the random stream."""
    plain, dflash = pipes()
    chosen = prompts[::6]
    expected = answer(plain, chosen, **REQUESTS[name])
    got, stats = counted(dflash, lambda: answer(dflash, chosen, **REQUESTS[name]))
    assert got == expected
    assert stats['accepted_tokens'] > 0
    again = [answer(dflash, [text], **REQUESTS[name])[0] for text in chosen[:2]]
    assert again == expected[:2]


def test_requests_of_all_kinds_in_one_batch(pipes, prompts):
    """Red when a row gets the options, the seed or the history of another, or a batch of greedy and sampled rows takes
    a path of its own."""
    from lmdeploy import GenerationConfig
    answers = []
    for pipe in pipes():
        configs = [GenerationConfig(**{'max_new_tokens': 48, **options}) for options in REQUESTS.values()]
        outs = pipe(prompts[:len(configs)], gen_config=configs, do_preprocess=False)
        answers.append([(out.token_ids, out.finish_reason) for out in outs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize('cap', [1, 2, 5, 17])
def test_a_cap_cuts_exactly(cap, pipes, prompts, answer):
    """Red when an accepted run goes over `max_new_tokens`, or ends before."""
    plain, dflash = pipes()
    got = answer(dflash, prompts[:4], max_new_tokens=cap)
    assert got == answer(plain, prompts[:4], max_new_tokens=cap)
    assert {(len(ids), reason) for ids, reason, _ in got} == {(cap, 'length')}


def test_stop_tokens_and_min_new_tokens_inside_a_run(pipes, prompts, answer):
    """Red when what follows a stop word in an accepted run is kept, or `min_new_tokens` counts steps.

    A token of each answer, wherever it lies in a run, becomes the stop token: it must end the answer where it is the
    first one allowed to, and only there. Plain decoding is no measure here: LMDeploy bans the stop token for one token
    more, as its host counts a step behind.
    """
    plain, dflash = pipes()
    whole = answer(plain, prompts[:3], max_new_tokens=40)
    for row, (ids, _, _) in enumerate(whole):
        for place in (3, 11, 12, 19):
            stop, first = ids[place], ids.index(ids[place])
            for least in (0, first, first + 1):
                options = {'max_new_tokens': 40, 'stop_token_ids': [stop], 'min_new_tokens': least}
                (got, reason, _), = answer(dflash, prompts[row:row + 1], **options)
                assert got[:first] == ids[:first]
                if least <= first:
                    assert (len(got), reason) == (first, 'stop')
                else:
                    assert len(got) > first
                    assert got[first] != stop


def test_log_probabilities(pipes, prompts, answer):
    """Red when a token gets the probabilities of another row, those after a penalty, or one too many at a stop."""
    for options in ({'logprobs': 3}, {'logprobs': 2, **REQUESTS['repetition penalty'], 'top_k': 20}):
        expected, got = (answer(pipe, prompts[:4], **options) for pipe in pipes(logprobs_mode='raw_logprobs'))
        assert [row[:2] for row in got] == [row[:2] for row in expected]
        for (ids, _, ours), (_, _, plain) in zip(got, expected, strict=True):
            assert len(ours) == len(plain) >= len(ids)
            for one, other in zip(ours, plain, strict=True):
                assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize('sampled', [False, True])
def test_a_grammar_is_followed(sampled, pipes, prompts, answer):
    """Red when a drafted token that the grammar forbids is kept, or the grammar's state counts rejected tokens."""
    schema = {'type': 'object', 'properties': {'age': {'type': 'integer'}}, 'required': ['age']}
    for grammar in ({'type': 'regex_schema', 'regex_schema': '(Tom has|Let us say) [0-9]{1,3} [a-z]{2,8}\\.'},
                    {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema}}):
        options = {'max_new_tokens': 40, 'response_format': grammar, **(SAMPLED if sampled else {})}
        expected, got = (answer(pipe, prompts[:3], **options) for pipe in pipes())
        assert got == expected


def test_a_shorter_draft(start, prompts, answer, demo, pipes):
    """Red when the draft length is not the one asked for, or a shorter block changes an answer."""
    with start(demo / 'ar', demo / 'dflash', draft_tokens=4) as pipe:
        got, stats = counted(pipe, lambda: answer(pipe, prompts[:6]))
    assert got == answer(pipes()[0], prompts[:6])
    assert stats['drafted_tokens'] == 4 * stats['verify_steps'] > stats['accepted_tokens'] > 0
