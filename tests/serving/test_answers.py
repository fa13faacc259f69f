"""What a client gets from a real API server: text, usage, finish reasons, company."""
from concurrent.futures import ThreadPoolExecutor

STOP_TOKENS = (0, 2)


def _ids(tokenizer, prompt):
    chat = [{'role': 'user', 'content': prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_stream_is_the_answer_in_pieces(client, ask, prompts):
    """Red when a block is sent twice, out of order, or with the tokens after a stop."""
    for prompt in prompts[::3]:
        whole = ask(prompt)
        pieces = list(client.chat.completions.create(model='demo', messages=[{'role': 'user', 'content': prompt}],
                                                     temperature=0, max_tokens=64, stream=True,
                                                     stream_options={'include_usage': True}))
        text = ''.join(piece.choices[0].delta.content or '' for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        reasons = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
        assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_usage_and_finish_reason(ask, prompts, tokenizer):
    """A recount with the tokenizer. Red when masks, padding or tokens after a stop count, or a reason is wrong."""
    reasons = set()
    for limit in (5, 33, 200):
        for prompt in prompts[1::5]:
            answer = ask(prompt, max_tokens=limit)
            choice = answer.choices[0]
            assert answer.usage.prompt_tokens == len(_ids(tokenizer, prompt))
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
            reasons.add(choice.finish_reason)
            recount = len(tokenizer.encode(choice.message.content, add_special_tokens=False))
            if choice.finish_reason == 'length':
                assert answer.usage.completion_tokens == limit
            else:
                assert choice.finish_reason == 'stop'
                assert answer.usage.completion_tokens <= limit
            # a text may be encoded in fewer tokens than it was generated in, never in more
            assert recount <= answer.usage.completion_tokens
    assert reasons == {'stop', 'length'}


def test_limit_is_a_prefix(ask, prompts):
    """A shorter limit cuts the same answer. Red when the cap moves the cut inside a block (known fault U1)."""
    whole = ask(prompts[2], max_tokens=60).choices[0].message.content
    for limit in (1, 7, 31, 32, 33, 59):
        assert whole.startswith(ask(prompts[2], max_tokens=limit).choices[0].message.content.rstrip('\ufffd'))


def test_stop_words_end_the_text(ask, prompts):
    """Red when a stop word is ignored inside a block or left in the text."""
    whole = ask(prompts[0], max_tokens=64).choices[0].message.content
    for word in ('.', '\n'):
        assert word in whole
        cut = ask(prompts[0], max_tokens=64, stop=[word])
        assert cut.choices[0].finish_reason == 'stop'
        assert cut.choices[0].message.content == whole[:whole.index(word)]


def test_thirty_two_at_once(ask, prompts):
    """32 concurrent requests answer as each does alone. Red when rows, states or pages of requests are mixed up."""
    alone = [ask(prompt).choices[0].message.content for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, prompts * 2))
    texts = [answer.choices[0].message.content for answer in together]
    same = sum(text == alone[index % len(prompts)] for index, text in enumerate(texts))
    # company changes the last bits of matrix products, and so may decide a near-tie
    assert same >= 30
    assert all(answer.choices[0].finish_reason in ('stop', 'length') for answer in together)


def test_seeded_sampling_is_reproducible(ask, prompts):
    """Red when a request's seed is lost, or all positions of a block draw the same number."""
    options = {'temperature': 1.2, 'seed': 7, 'max_tokens': 48, 'top_p': 0.95}
    first, second = (ask(prompts[3], **options).choices[0].message.content for _ in range(2))
    assert first == second
    assert first != ask(prompts[3], **{**options, 'seed': 8}).choices[0].message.content


def test_second_turn_of_a_conversation(client, ask, prompts):
    """The whole conversation is the prompt of the next turn. Red when state of the first turn leaks into the second."""
    first = ask(prompts[0]).choices[0].message.content
    messages = [{'role': 'user', 'content': prompts[0]}, {'role': 'assistant', 'content': first},
                {'role': 'user', 'content': prompts[5]}]
    answers = [client.chat.completions.create(model='demo', messages=messages, temperature=0, max_tokens=48)
               for _ in range(2)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_counters_agree_with_usage(server, ask, prompts):
    """Red when the metrics are not of this engine, or count what no client got."""
    before = server.counters()
    answers = [ask(prompt) for prompt in prompts[:4]]
    after = server.counters()
    spent = {name: after[name] - before[name] for name in after}
    completion = sum(answer.usage.completion_tokens for answer in answers)
    # a prompt's own block is decoded in part by prefill, and the last block beyond the stop: at most a block each
    assert completion - 32 * 4 <= spent['decoded_tokens'] <= completion + 64 * 4
    assert 0 < spent['steps'] <= spent['decoded_tokens']
    assert spent['suffix_rows'] < spent['prefix_rows']
    assert 0 < spent['evicting_steps'] <= spent['steps']
    assert spent['blocks'] >= 4
