"""The distribution of four emitted tokens against plain sampling's, computed by enumeration; 20,000 sequences a case.

The target is a Markov chain over six tokens, the draft is a wrong one on purpose, and the host's sequences stay as they
were before the first token: all that depends on the tokens so far must come from the device's state.
"""
import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.messages import SamplingParam
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.spec_decode.guided_spec_helper import GuidedSpecHelper

from lmdeploy_focus.activation import activate_cpu
from lmdeploy_focus.cpu.scope import cpu_scope
from lmdeploy_focus.dflash.agent import DFlashSpecModelAgent
from lmdeploy_focus.dflash.strategy import DFlashExtraInputs, DFlashSamplingStrategy, DFlashStepInputs

SEQUENCES, TOKENS, DRAFTED, EMITTED, PROMPT, STOP = 20_000, 6, 3, 4, 2, 5
TABLE = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(4)) * 1.5
CASES = {
    'temperature': {'temperature': 1.7},
    'top-k': {'top_k': 2},
    'top-p': {'top_p': 0.6},
    'min-p': {'min_p': 0.3},
    'repetition penalty': {'repetition_penalty': 2.5},
    'bad words': {'bad_words': [0, 3]},
    'min_new_tokens': {'min_new_tokens': 2, 'stop_words': [STOP]},
    'all': {'temperature': 1.3, 'top_k': 4, 'top_p': 0.9, 'min_p': 0.05, 'repetition_penalty': 1.8, 'bad_words': [3],
            'min_new_tokens': 2, 'stop_words': [STOP]},
}


def next_token(history, param):
    """Plain sampling's probabilities [TOKENS] after the generated tokens `history`."""
    scores = TABLE[history[-1] if history else PROMPT].double().numpy().copy()
    for token in set(history):
        penalty = param.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    scores /= param.temperature
    scores[param.bad_words] = -np.inf
    if len(history) < param.min_new_tokens:
        scores[param.stop_words] = -np.inf
    order = np.argsort(-scores)
    if param.top_k:
        scores[order[param.top_k:]] = -np.inf
    kept = softmax(scores)[order]
    before = kept.cumsum() - kept
    scores[order[1:][before[1:] > param.top_p]] = -np.inf
    probabilities = softmax(scores)
    scores[probabilities < param.min_p * probabilities.max()] = -np.inf
    return softmax(scores)


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def expected_joint(param):
    """Probability of every run of EMITTED tokens."""
    joint = np.zeros((TOKENS, ) * EMITTED)
    for run in itertools.product(range(TOKENS), repeat=EMITTED):
        steps = [next_token(list(run[:i]), param)[run[i]] for i in range(EMITTED)]
        joint[run] = np.prod(steps)
    return joint


def make_agent():
    agent = DFlashSpecModelAgent.__new__(DFlashSpecModelAgent)
    agent.num_spec_tokens, agent.guided_helper = DRAFTED, GuidedSpecHelper()
    agent.misc_config = SimpleNamespace(logprobs_mode=None)
    return agent


def sampled_runs(param, draft, first_seed=0):
    """Decode until every sequence has EMITTED tokens: int [SEQUENCES, EMITTED], and how many drafts were accepted.

    draft: function of the last token [S] -> drafted tokens [S, DRAFTED].
    """
    seqs = [SimpleNamespace(sampling_param=SamplingParam(**vars(param) | {'random_seed': first_seed + index}),
                            num_new_tokens=0, num_valid_ids=1, generated_ids=np.zeros(0, np.int64), seq_id=0,
                            session=SimpleNamespace(session_id=index)) for index in range(SEQUENCES)]
    strategy, agent, ones = DFlashSamplingStrategy(0, DRAFTED), make_agent(), torch.ones(SEQUENCES, dtype=torch.long)
    state = DFlashStepInputs(_num_spec_tokens=DRAFTED)
    runs, accepted = [[] for _ in seqs], 0

    async def step(inputs, extra, sampling_inputs):
        extra.target_logits = TABLE[inputs.input_ids.flatten()]
        extra = await agent.async_sampling_logits(inputs, extra, sampling_inputs)
        for run, tokens in zip(runs, extra.output_token_ids.tolist(), strict=True):
            run.extend(token for token in tokens if token >= 0)
        return extra.clone(output_draft_token_ids=draft(extra.next_token_ids))

    async def decode():
        nonlocal accepted
        sampling_inputs = strategy.make_sampling_inputs(seqs).to_device('cpu')
        inputs = ModelInputs(input_ids=torch.full((1, SEQUENCES), PROMPT), seq_length=ones, history_lengths=ones * 0,
                             block_offsets=torch.zeros(SEQUENCES, 1, dtype=torch.long), is_decoding=False,
                             num_ignored_history=ones * 0, max_q_seqlen=1, max_kv_seqlen=1, sum_kv_seqlen=SEQUENCES)
        extra = await step(inputs, DFlashExtraInputs(), sampling_inputs)
        criteria = SimpleNamespace(clone=lambda: criteria)
        state.merge_prefill(inputs, extra, criteria, sampling_inputs.get_delta(), extra.next_token_ids, None,
                            SimpleNamespace(draft_token_ids=extra.output_draft_token_ids))
        while min(map(len, runs)) < EMITTED:
            sampling_inputs = strategy.make_sampling_inputs(seqs).to_device('cpu')
            sampling_inputs.update_delta(state.sampling_delta)
            extra = await step(state.model_inputs, state.extra_inputs, sampling_inputs)
            accepted += int((DRAFTED - extra.num_rejected_tokens).sum())
            state.step_decode(state.model_inputs, extra, criteria, sampling_inputs.get_delta(), extra.next_token_ids,
                              None, None)

    activate_cpu()
    with cpu_scope(), torch.inference_mode():
        asyncio.run(decode())
    return torch.tensor([run[:EMITTED] for run in runs]), accepted


def chi_square(runs, joint):
    """Statistic and degrees of freedom; outcomes of fewer than five expected draws count as one."""
    observed = np.zeros_like(joint)
    np.add.at(observed, tuple(runs.T.numpy()), 1)
    assert observed[joint == 0].sum() == 0, 'a token outside the filters was emitted'
    expected = joint * len(runs)
    rare = expected < 5
    terms = [((observed - expected)**2 / np.where(rare, 1, expected))[~rare]]
    if expected[rare].sum() >= 5:
        terms.append(np.array([(observed[rare].sum() - expected[rare].sum())**2 / expected[rare].sum()]))
    terms = np.concatenate(terms)
    return terms.sum(), len(terms) - 1


def greedy_then_fixed(last):
    """The chain's best token, then one that is often wrong, then the best after that one."""
    first, second = TABLE[last].argmax(-1), torch.full_like(last, 1)
    return torch.stack([first, second, TABLE[second].argmax(-1)], 1)


@pytest.mark.parametrize('name', CASES)
def test_emitted_tokens_follow_plain_sampling(name):
    """Red when a filter, a penalty or `min_new_tokens` is ignored at drafted positions, uses the history of another
    position, or when acceptance favours what was drafted."""
    param = SamplingParam(**{'temperature': 1.0, 'top_k': 0, **CASES[name]})
    runs, accepted = sampled_runs(param, greedy_then_fixed)
    statistic, freedom = chi_square(runs, expected_joint(param))
    assert accepted > SEQUENCES / 20
    # Five standard deviations; the draws are fixed by their seeds.
    assert statistic < freedom + 5 * (2 * freedom)**0.5, (statistic, freedom)


def test_a_seed_gives_the_same_tokens_whatever_is_drafted():
    """Red when the place in the random stream follows steps or drafts instead of positions."""
    param = SamplingParam(**{'temperature': 1.0, 'top_k': 0, **CASES['all']})
    runs, _ = sampled_runs(param, greedy_then_fixed)
    again, accepted = sampled_runs(param, lambda last: torch.full((len(last), DRAFTED), STOP))
    assert torch.equal(runs, again)
    assert accepted < SEQUENCES / 2
    other, _ = sampled_runs(param, greedy_then_fixed, first_seed=1 << 20)
    assert not torch.equal(runs, other)


def test_the_test_sees_a_wrong_distribution():
    """Red when the statistic would let top-k at drafted positions go unnoticed, as in LMDeploy 0.18."""
    param = SamplingParam(temperature=1.0, top_k=3)
    runs, _ = sampled_runs(param, greedy_then_fixed)
    nearly = expected_joint(SamplingParam(temperature=1.1, top_k=3))
    statistic, freedom = chi_square(runs, nearly)
    assert statistic > freedom + 5 * (2 * freedom)**0.5
