"""Sampling parameters belong to their own rows (known faults U2, U3, U7)."""
import numpy as np
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputs

from lmdeploy_focus.engine.sampling import FocusSamplingStrategy, expand_rows


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


def _expand(sequences, rows, positions, length=4):
    inputs = FocusSamplingStrategy(0).make_sampling_inputs(sequences)
    count = len(sequences)
    return expand_rows(inputs, torch.tensor(rows), torch.tensor(positions), torch.full((count, ), 64),
                       torch.full((count, ), 64), length)


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
    for step in range(5):
        sequence = _Sequence(top_k=0, random_seed=1)
        sequence.num_valid_ids = 5 + step
        seen |= set(_expand([sequence], [0] * 4, [0, 1, 2, 3]).random_offsets.tolist())
    assert len(seen) == 20


def test_min_new_tokens_bans_stop_words_by_position():
    """Red when the ban covers the whole first block, or counts the prompt's part of it."""
    inputs = FocusSamplingStrategy(0).make_sampling_inputs([_Sequence(min_new_tokens=3, stop_words=[9])])
    rows = expand_rows(inputs, torch.zeros(8, dtype=torch.long), torch.arange(8), torch.tensor([64]),
                       torch.tensor([66]), 8)
    assert (rows.num_ignore_eos > 0).tolist() == [True] * 5 + [False] * 3
    assert rows.bad_words is None


def test_no_field_is_forgotten():
    """Red when LMDeploy gives SamplingInputs a tensor per sequence that is not expanded."""
    known = {'temperature', 'bad_words', 'bad_mask', 'stop_words', 'stop_mask', 'repetition_penalty', 'top_k', 'top_p',
             'min_p', 'random_seeds', 'random_offsets', 'max_top_k', 'has_greedy', 'min_top_p', 'response_formats',
             'logits_processors', 'max_num_logprobs', 'all_ids', 'num_ignore_eos', 'batch_size', 'session_ctx',
             'session_to_cleanup', 'generated_ids', 'generated_ids_cpu', 'repetition_ngram_size',
             'repetition_ngram_threshold', 'max_repetition_ngram_size'}
    assert set(SamplingInputs.__dataclass_fields__) == known


def test_a_greedy_request_is_the_same_in_hot_company(pipelines, decode, demo_items):
    """Known fault U2 end to end. Red when temperature, top-k or a seed of one request reaches another's rows."""
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32')
    prompts = [item.prompt for item in demo_items[:8]]
    greedy = GenerationConfig(max_new_tokens=64, do_sample=False)
    hot = GenerationConfig(max_new_tokens=64, do_sample=True, temperature=1.5, top_k=50, random_seed=3)
    alone = decode(pipe, prompts[::2])
    mixed = pipe(prompts, gen_config=[greedy, hot] * 4)
    assert [list(answer.token_ids) for answer in mixed[::2]] == alone
    again = pipe(prompts, gen_config=[greedy, hot] * 4)
    assert [list(a.token_ids) for a in mixed[1::2]] == [list(a.token_ids) for a in again[1::2]], 'seeded'
    assert [list(a.token_ids) for a in mixed[1::2]] != decode(pipe, prompts[1::2]), 'the hot rows were sampled'


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


def test_the_mask_token_is_never_text(pipelines, demo_items, monkeypatch):
    """Known fault U3: the mask token wins every argmax, and is still not committed. Red without the ban."""
    from lmdeploy import GenerationConfig
    from lmdeploy.pytorch.models.sdar import SDARForCausalLM
    pipe = pipelines(dtype='float32')
    original = SDARForCausalLM.get_logits

    def favour(self, hidden):
        logits = original(self, hidden)
        logits[..., 3] += 1e4
        return logits

    monkeypatch.setattr(SDARForCausalLM, 'get_logits', favour)
    prompts = [item.prompt for item in demo_items[:3]] + ['What does <|MASK|> mean? <|MASK|><|MASK|>']
    for answer in pipe(prompts, gen_config=GenerationConfig(max_new_tokens=48, do_sample=False, ignore_eos=True)):
        assert len(answer.token_ids) == 48
        assert 3 not in answer.token_ids
