"""Sampling parameters belong to their own rows (known faults U2, U3, U7)."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy_focus.kernels.dispatch import kernels_for

from lmdeploy_focus.engine.sampling import FocusSamplingStrategy, Samplers, expand_rows
from lmdeploy_focus.stages.state import FocusState, first_rows

MASK_TOKEN = 3


class _Sequence:
    """What the sampling strategy reads of a sequence."""
    num_new_tokens = 0
    num_valid_ids = 5
    seq_id = 0
    generated_ids = np.zeros(0, dtype=np.int64)

    def __init__(self, **params):
        from lmdeploy.pytorch.messages import SamplingParam
        self.sampling_param = SamplingParam(**params)
        self.session = type('Session', (), {'session_id': 0})
        self.valid_ids = np.arange(5)


def _inputs(*params):
    """Sampling inputs of sequences with these parameters."""
    return FocusSamplingStrategy(0).make_sampling_inputs([_Sequence(**{'temperature': 1., 'top_p': 1.} | own)
                                                          for own in params])


def _state(sequences, length=4):
    """Sequences in the first block of their answers; each has drawn as often as its index says."""
    state = FocusState(sequences + 2, length, 'cpu')
    one = torch.ones(sequences, dtype=torch.int64)
    state.append(first_rows(torch.zeros(sequences, length, dtype=torch.int64),
                            torch.ones(sequences, length, dtype=torch.bool), 64 * one, 99 * one, 64 * one,
                            torch.arange(sequences), 1.5, .8))
    return state


def _expand(sequences, rows, positions, length=4):
    inputs = FocusSamplingStrategy(0).make_sampling_inputs(sequences)
    return expand_rows(inputs, torch.tensor(rows), torch.tensor(positions), _state(len(sequences), length).columns,
                       length)


def test_each_row_has_its_sequences_parameters():
    """Every tensor field. Red with stock's tiling, which gives row 1 of sequence 0 the parameters of sequence 1."""
    sequences = [_Sequence(temperature=0.1 * (i + 1), top_k=i + 2, top_p=0.5 + 0.1 * i, min_p=0.01 * (i + 1),
                           random_seed=100 + i, repetition_penalty=1 + 0.1 * i, stop_words=[10 + i] * (i + 1),
                           bad_words=[20 + i]) for i in range(3)]
    rows = [0, 0, 1, 2, 2, 2]
    out = _expand(sequences, rows, [0, 3, 1, 0, 1, 2])
    expected = {'temperature': [0.1, 0.2, 0.3], 'top_k': [2, 3, 4], 'top_p': [0.5, 0.6, 0.7],
                'min_p': [0.01, 0.02, 0.03], 'random_seeds': [100, 101, 102], 'repetition_penalty': [1.0, 1.1, 1.2]}
    for name, values in expected.items():
        torch.testing.assert_close(getattr(out, name).double(), torch.tensor([values[r] for r in rows]).double())
    assert out.stop_words.tolist() == [[[10, -1, -1], [11, 11, -1], [12, 12, 12]][r] for r in rows]
    assert out.bad_words.flatten().tolist() == [20 + r for r in rows]
    assert out.batch_size == 6


def test_custom_processors_follow_their_rows():
    """Red when a request's logits processor is applied to another request's rows, or to one row a request only."""
    first, second = (lambda ids, logits: logits), (lambda ids, logits: logits)
    out = _expand([_Sequence(logits_processors=[first]), _Sequence(), _Sequence(logits_processors=[second])],
                  [0, 0, 1, 2], [0, 1, 2, 3])
    assert out.logits_processors == [[first], [first], None, [second]]
    assert out.all_ids.shape == (4, 5)


def test_every_row_draws_its_own_number():
    """Red when two positions of a block, or the same position of two steps, share a place in the random stream."""
    seen = set()
    for sequence in range(5):  # each has drawn once more than the one before
        seen |= set(_expand([_Sequence(top_k=0, random_seed=1)] * 5, [sequence] * 4, [0, 1, 2, 3])
                    .random_offsets.tolist())
    assert len(seen) == 20


def test_min_new_tokens_bans_stop_words_by_position():
    """Red when the ban covers the whole first block, or counts the prompt's part of it."""
    inputs = _inputs({'min_new_tokens': 3, 'stop_words': [9]}, {'stop_words': [9]})
    state = _state(2, 8).columns
    state.output_start.copy_(torch.tensor([66, 64]))
    rows = expand_rows(inputs, torch.tensor([0] * 8 + [1]), torch.tensor([*range(8), 0]), state, 8)
    assert (rows.num_ignore_eos > 0).tolist() == [True] * 5 + [False] * 3 + [False]
    assert rows.bad_words is None


HOT = [{'temperature': 2., 'top_k': 7, 'random_seed': 3}, {'temperature': .7, 'top_k': 64, 'top_p': .6},
       {'top_k': 1}, {'temperature': 3., 'top_k': 40, 'min_p': .05, 'random_seed': 2**40 + 9},
       {'top_k': 2, 'random_seed': 3}]


def _drawn(params, logits, sequence, position, offsets=None):
    """Tokens and confidences on the device, as a decode step draws them."""
    state = _state(len(params))
    if offsets is not None:
        state.columns.random_offset.copy_(offsets)
    draw = Samplers(kernels_for('cpu'), state, MASK_TOKEN).take(_inputs(*params))
    return draw.sampler(logits, torch.tensor([len(logits)]), torch.tensor(sequence), torch.tensor(position))


def test_what_is_drawn_on_the_device():
    """Red when a parameter that the device does not know is dropped in silence, the usual ones take the slow way, or a
    request takes others along."""
    samplers = Samplers(kernels_for('cpu'), _state(2), MASK_TOKEN)
    greedy, sampled = samplers.named()

    def way(**own):
        return samplers.take(_inputs({'top_k': 1}, {'top_k': 1} | own))

    assert (greedy.name, sampled.name) == ('greedy', 'sampled')
    assert way() is way(random_seed=4) is way(stop_words=[5]) is way(bad_words=[4] * 64) is greedy
    for own in ({'temperature': .5}, {'top_k': 64}, {'top_k': 5, 'top_p': .5}, {'top_k': 5, 'min_p': .1}):
        assert way(**own) is sampled, own
    for own in ({'top_k': 65}, {'top_k': 0}, {'repetition_penalty': 1.1}, {'bad_words': [4] * 65},
                {'min_new_tokens': 2, 'stop_words': [5]}, {'logits_processors': [lambda ids, logits: logits]},
                {'repetition_ngram_size': 3, 'repetition_ngram_threshold': 2}):
        assert _inputs({'top_k': 1}, own, {'top_k': 1}).unusual == (1, ), own
    assert _inputs({'top_k': 64, 'top_p': .5, 'random_seed': 4, 'stop_words': [5], 'bad_words': [4] * 64}).unusual == ()


@pytest.mark.parametrize('name', ['greedy', 'sampled'])
def test_banned_tokens_on_the_device_are_those_of_each_sequence(name):
    """Red when a ban reaches another's rows, outlives its request, or leaves its token a share of the confidence."""
    own = {'top_k': 1} if name == 'greedy' else {'top_k': 2, 'temperature': .5}
    samplers = Samplers(kernels_for('cpu'), _state(2), MASK_TOKEN)
    logits = torch.tensor([[9., 8., 1., 20., 0.]] * 3)
    rows = torch.tensor([3]), torch.tensor([0, 1, 0]), torch.tensor([0, 1, 2])
    draw = samplers.take(_inputs(own, own | {'bad_words': [0, 1]}))
    tokens, scores = draw.sampler(logits.clone(), *rows)
    assert draw.name == name
    assert int(tokens[1]) in (2, 4) and {int(tokens[0]), int(tokens[2])} <= {0, 1}
    allowed = (logits[1, [2, 4]] / own.get('temperature', 1.)).softmax(0)
    assert float(scores[1]) == pytest.approx(float(allowed[[2, 4].index(int(tokens[1]))]))
    tokens, _ = samplers.take(_inputs(own, own)).sampler(logits.clone(), *rows)
    assert {int(token) for token in tokens} <= {0, 1}


def test_parameters_on_the_device_are_those_of_each_sequence():
    """Red when one of them is another's, is lost because all share it, or is left over from a larger batch."""
    taken = []
    kernels = SimpleNamespace(sampled_head=lambda logits, *rest: taken.append(rest) or (logits, logits))
    state = _state(5)
    samplers = Samplers(kernels, state, MASK_TOKEN)
    rows = torch.tensor([4]), torch.tensor([0, 0, 3]), torch.tensor([1, 2, 0])
    names = 'temperature', 'top_k', 'top_p', 'min_p', 'random_seed'
    defaults = {'temperature': 1., 'top_p': 1., 'min_p': 0.}
    for keep in ([0, 1, 2, 3, 4], [3, 0, 2], [1], [4, 4]):
        state.take(torch.tensor(keep))
        params = [HOT[index] for index in keep]
        samplers.take(_inputs(*params)).sampler(torch.zeros(3, 9), *rows)
        mask, real, sequence, position, *values, offset, length = taken.pop()
        assert (mask, length) == (MASK_TOKEN, 4) and [real, sequence, position] == list(rows)
        for name, value in zip(names, values, strict=True):
            for s, own in enumerate(params):
                if name in own | defaults:
                    wanted = (defaults | own)[name]
                    assert float(value[s]) == pytest.approx(wanted & 0xffffffff if name == 'random_seed' else wanted)
        assert offset[:len(keep)].equal(state.columns.random_offset)
        state.append(_state(5).table[:5 - len(keep)])


def test_draws_are_a_sequences_own():
    """Mixed parameters, alone and together, row by row. Red when company changes a token, a seed does not repeat it, or
    a row's place in the stream is not its own."""
    random = torch.Generator().manual_seed(0)
    count, rows = len(HOT), 60
    logits = torch.randn(rows, 300, generator=random) * 2
    sequence, position = [row % count for row in range(rows)], [row // count % 4 for row in range(rows)]
    tokens, scores = _drawn(HOT, logits, sequence, position)
    for s, own in enumerate(HOT):
        mine = [row for row in range(rows) if sequence[row] == s]
        if 'random_seed' not in own and own['top_k'] > 1:
            continue  # seeded by chance
        again = _drawn([own], logits[mine], [0] * len(mine), [position[row] for row in mine], torch.tensor([s]))
        assert again[0].equal(tokens[mine])
        torch.testing.assert_close(again[1], scores[mine])
    for s, own in enumerate(HOT):
        mine = [row for row in range(rows) if sequence[row] == s]
        allowed = logits[mine].topk(own['top_k']).indices
        assert (allowed == tokens[mine][:, None]).any(1).all()
    hot = [row for row in range(rows) if sequence[row] == 0]
    assert tokens[hot].ne(logits[hot].argmax(1)).any()


@pytest.mark.parametrize('top_k', [1, 7])
def test_a_block_draws_different_numbers(top_k):
    """Sixteen equal rows. Red when neighbours in a block or two steps draw the same number, or the greedy ones draw."""
    logits = torch.zeros(16, 300) + torch.arange(300) / 1e4
    drawn = {tuple(_drawn([{'temperature': 1.3, 'top_k': top_k, 'random_seed': 5}], logits, [0] * 16, range(16),
                          torch.tensor([offset]))[0].tolist()) for offset in (0, 4, 8)}
    assert len(drawn) == (1 if top_k == 1 else 3)
    assert all(len(set(tokens)) == 1 if top_k == 1 else len(set(tokens)) > 3 for tokens in drawn)


@pytest.mark.parametrize('params', [{'top_k': 1}, *HOT], ids=str)
def test_the_mask_token_is_never_drawn(params):
    """Known fault U3: it is committed as text. Red when it is, although it is by far the most likely token."""
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(1))
    logits[:, MASK_TOKEN] = 1e4
    tokens, scores = _drawn([params], logits, [0] * 200, [0, 1, 2, 3] * 50)
    assert tokens.ne(MASK_TOKEN).all() and scores.gt(0).all()


def test_no_field_is_forgotten():
    """Red when LMDeploy gives SamplingInputs a tensor per sequence that is not expanded."""
    known = {'temperature', 'bad_words', 'bad_mask', 'stop_words', 'stop_mask', 'repetition_penalty', 'top_k', 'top_p',
             'min_p', 'random_seeds', 'random_offsets', 'max_top_k', 'has_greedy', 'min_top_p', 'response_formats',
             'logits_processors', 'max_num_logprobs', 'all_ids', 'num_ignore_eos', 'batch_size', 'session_ctx',
             'session_to_cleanup', 'generated_ids', 'generated_ids_cpu', 'repetition_ngram_size',
             'repetition_ngram_threshold', 'max_repetition_ngram_size'}
    assert set(SamplingInputs.__dataclass_fields__) == known


def _texts(pipe, prompts, configs):
    return [list(answer.token_ids) for answer in pipe(prompts, gen_config=configs)]


def test_a_request_is_the_same_in_any_company(pipelines, demo_items):
    """Known fault U2 end to end, on the device and by LMDeploy's processors. Red when temperature, top-k, a penalty, a
    ban or a seed of one request reaches another's rows, or a seed does not repeat."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32')
    prompts = [item.prompt for item in demo_items[:6]]
    usual = [GenerationConfig(max_new_tokens=40, do_sample=False),
             GenerationConfig(max_new_tokens=40, do_sample=True, temperature=1.5, top_k=50, random_seed=3),
             GenerationConfig(max_new_tokens=40, do_sample=True, temperature=.9, top_k=64, top_p=.8, min_p=.02,
                              random_seed=4)] * 2
    mixed = _texts(pipe, prompts, usual)
    assert mixed == [_texts(pipe, [prompt], [config])[0] for prompt, config in zip(prompts, usual, strict=True)]
    assert mixed[1] != _texts(pipe, prompts[1:2], usual[:1])[0], 'the hot rows were sampled'
    odd = GenerationConfig(max_new_tokens=40, do_sample=True, top_k=0, temperature=1.2, random_seed=5)
    with_odd = _texts(pipe, prompts, [*usual[:3], odd, *usual[4:]])
    assert with_odd[:3] + with_odd[4:] == mixed[:3] + mixed[4:]
    assert with_odd[3] == _texts(pipe, prompts[3:4], [odd])[0] != mixed[3]

    def greedy(**own):
        return GenerationConfig(max_new_tokens=40, do_sample=False, **own)

    # do_sample=False would reset the penalty; tokens count from the next block on
    penalised = GenerationConfig(max_new_tokens=80, do_sample=True, top_k=1, temperature=1., repetition_penalty=20.,
                                 ignore_eos=True)
    unusual = [greedy(), penalised, greedy(bad_token_ids=[mixed[0][0], mixed[3][0]]),
               greedy(), greedy(min_new_tokens=36), greedy(ignore_eos=True)]
    mixed = _texts(pipe, prompts, unusual)
    alone = [_texts(pipe, [prompt], [config])[0] for prompt, config in zip(prompts, unusual, strict=True)]
    assert mixed == alone
    penalised.repetition_penalty = 1.
    assert mixed[1] != _texts(pipe, prompts[1:2], [penalised])[0] and len(mixed[4]) >= 36


def test_custom_processors_reach_every_row_of_their_request(pipelines, decode, demo_items):
    """Known fault U7 end to end: a processor that bans everything but one token."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32')

    def only(token):

        def processor(all_ids, logits):
            keep = logits[token].clone()
            logits.fill_(float('-inf'))
            logits[token] = keep
            return logits

        return processor

    configs = [GenerationConfig(max_new_tokens=40, do_sample=False, ignore_eos=True, logits_processors=[only(50)]),
               GenerationConfig(max_new_tokens=40, do_sample=False),
               GenerationConfig(max_new_tokens=40, do_sample=False, ignore_eos=True, logits_processors=[only(60)])]
    answers = pipe([item.prompt for item in demo_items[:3]], gen_config=configs)
    assert list(answers[0].token_ids) == [50] * 40
    assert list(answers[2].token_ids) == [60] * 40
    assert list(answers[1].token_ids) == decode(pipe, [demo_items[1].prompt], max_new_tokens=40)[0]


@pytest.mark.parametrize('changes', [{}, {'do_sample': True, 'top_k': 5, 'random_seed': 1}, {'bad_token_ids': [50]}],
                         ids=['greedy', 'sampled', 'processors'])
def test_the_mask_token_is_never_text(pipelines, demo_items, monkeypatch, changes):
    """Known fault U3: the mask token wins every argmax, and is still not committed. Red without the ban."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32')
    runner = pipe.async_engine.engine.executor.model_agent.runner
    original = runner.model.head

    def favour(hidden):
        logits = original(hidden)
        logits[..., 3] += 1e4
        return logits

    monkeypatch.setattr(runner.model, 'head', favour)
    prompts = [item.prompt for item in demo_items[:3]] + ['What does <|MASK|> mean? <|MASK|><|MASK|>']
    config = GenerationConfig(**{'max_new_tokens': 48, 'do_sample': False, 'ignore_eos': True} | changes)
    for answer in pipe(prompts, gen_config=config):
        assert len(answer.token_ids) == 48
        assert 3 not in answer.token_ids
