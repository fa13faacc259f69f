"""Policy: dense steps where they pay, decided by what steps cost, and written to every sequence that runs."""
import math

import pytest
import torch

from lmdeploy_focus import FocusGenerationConfig
from lmdeploy_focus.engine.graph_runner import GraphRunner
from lmdeploy_focus.engine.model_agent import FocusModelAgent
from lmdeploy_focus.engine.policy import DENSE_THRESHOLD, GAIN, Costs, Policy
from lmdeploy_focus.stages import step
from lmdeploy_focus.stages.state import FocusState

BUCKETS = [8, 16, 32]
DENSE = Policy('auto', False).choose(1.0, 1.0)


def test_what_a_step_costs():
    """Red when a part is looked up in another part's row, or a step that was not measured seems free."""
    costs = Costs(BUCKETS, torch.tensor([[1., 2., 3.], [10., 20., 30.], [100., 200., 300.]]))
    assert costs.of((8, 16, 32)) == 1 + 20 + 300
    assert costs.of((32, 8, 16)) == 3 + 10 + 200
    assert costs.of((8, 16, 64)) == math.inf


@pytest.mark.parametrize('option, fixed, expected', [('auto', False, False), ('auto', True, True),
                                                     ('always', False, True), ('never', False, False)])
def test_modes(option, fixed, expected):
    """Red when an option that leaves no choice chooses, or the choice ignores the tokens that a dense step brings."""
    policy = Policy(option, fixed)
    cheap, dear = policy.choose(10.0, 10.0 * GAIN), policy.choose(10.0, 10.1 * GAIN)
    assert cheap.evicting is expected
    assert dear is policy.first and dear.evicting is (option != 'never')
    assert policy.choose(10.0, math.inf) is policy.choose(math.inf, math.inf) is policy.first
    if option == 'auto' and not fixed:
        assert (cheap.alpha, cheap.threshold) == (64.0, DENSE_THRESHOLD)
    else:
        assert (cheap.alpha, cheap.threshold) == (None, 0.0)


def test_an_unknown_option():
    with pytest.raises(ValueError, match='sometimes'):
        Policy('sometimes', False)


@pytest.fixture
def chosen(monkeypatch):
    """Makes an engine run on fixed buffers with a policy; returns a function: pipeline -> runner."""
    agents = []

    def switch(pipe, policy):
        agent = pipe.async_engine.engine.executor.model_agent
        plain = agent._build_runner()
        columns = agent.cache_engine.cache_config.num_gpu_blocks
        agent._runner = GraphRunner(plain.model, plain.options, True, plain.state, columns,
                                    columns * plain.options.page_size, graphs=False, policy=policy)
        agents.append(agent)
        return agent._runner

    yield switch
    for agent in agents:
        agent._runner = None


def costs(runner, kept):
    """Costs of a runner's buckets: nothing but kept rows costs, in proportion where `kept` says so."""
    table = torch.zeros(3, len(runner.buckets))
    table[1] = torch.tensor(runner.buckets, dtype=torch.float32) if kept else 1.0
    return Costs(runner.buckets, table)


def spent(pipe, run):
    from lmdeploy_focus import run_stats
    before = run_stats(pipe)
    result = run()
    return result, {name: value - before[name] for name, value in run_stats(pipe).items()}


def test_dense_steps_are_the_delayed_cache(pipelines, decode, demo_items, chosen):
    """Where rows cost nothing, `auto` decodes token for token what `never` does at the dense threshold; where nothing
    was measured, what `always` does; and where rows cost, only steps of one or two sequences are dense.

    Red when a mode's alpha or threshold does not reach a sequence, one that joins later included.
    """
    prompts = [item.prompt for item in demo_items[:24]]  # more than a batch: sequences come and go
    options = {'dtype': 'float32', 'max_batch_size': 16}
    auto = pipelines(**options)
    runner = chosen(auto, Policy('auto', False))
    runner.costs = costs(runner, kept=False)
    answers, counted = spent(auto, lambda: decode(auto, prompts))
    never = pipelines(focus_policy='never', dllm_confidence_threshold=DENSE_THRESHOLD, **options)
    assert answers == decode(never, prompts)
    assert counted['dense_steps'] == counted['steps'] > 100 and counted['evicting_steps'] == 0

    runner.costs = costs(runner, kept=True)
    _, counted = spent(auto, lambda: decode(auto, prompts))
    assert 0 < counted['dense_steps'] < 0.2 * counted['steps']

    runner.costs = Costs([], torch.zeros(3, 0))
    answers, counted = spent(auto, lambda: decode(auto, prompts))
    always = pipelines(focus_policy='always', **options)
    assert answers == decode(always, prompts)
    assert counted['dense_steps'] == 0 < counted['evicting_steps']


def test_modes_change_amid_blocks(pipelines, decode, demo_items, chosen, monkeypatch):
    """Every third step is dense: both kinds are counted, answers end as they should, and with one mode again the next
    answers are that mode's. Red when a change of mode leaves a sequence with the other mode's numbers."""
    prompts = [item.prompt for item in demo_items[:24]]
    auto = pipelines(dtype='float32', max_batch_size=16)
    expected = decode(auto, prompts)
    policy = Policy('auto', False)
    runner = chosen(auto, policy)
    runner.costs = costs(runner, kept=False)
    calls = []

    def every_third(evicting_ms, dense_ms):
        calls.append(DENSE if len(calls) % 3 == 2 else policy.first)
        return calls[-1]

    monkeypatch.setattr(policy, 'choose', every_third)
    answers, counted = spent(auto, lambda: decode(auto, prompts))
    assert all(answers) and len(answers) == len(prompts)
    assert 0.2 * counted['steps'] < counted['dense_steps'] < 0.5 * counted['steps']
    assert counted['evicting_steps'] > 0
    monkeypatch.undo()
    runner.costs = Costs([], torch.zeros(3, 0))
    assert decode(auto, prompts) == expected


@pytest.mark.slow
def test_dense_steps_ask_for_no_less_than_a_request(pipelines, decode, demo_items, chosen):
    """Requests with thresholds above and below the dense one in one batch, token for token what engines with these
    thresholds do. Red when a dense step gives up a higher threshold, keeps a lower one, or heeds a request's alpha."""
    prompts = [item.prompt for item in demo_items[:12]]
    auto = pipelines(dtype='float32', max_batch_size=16)
    runner = chosen(auto, Policy('auto', False))
    runner.costs = costs(runner, kept=False)
    configs = [FocusGenerationConfig(max_new_tokens=40, do_sample=False, focus_alpha=alpha, confidence_threshold=own)
               for alpha, own in [(None, .97), (1.0, .6)] * 6]
    answers = [list(answer.token_ids) for answer in auto(prompts, gen_config=configs)]
    for index, threshold in enumerate((.97, DENSE_THRESHOLD)):
        never = pipelines(dtype='float32', max_batch_size=16, focus_policy='never', dllm_confidence_threshold=threshold)
        assert answers[index::2] == decode(never, prompts[index::2], max_new_tokens=40)


def test_a_change_of_mode_keeps_own_values(pipelines, demo_items, chosen, monkeypatch):
    """Every third step is dense, with knobs of their own in every request: what each row decides by in each step.

    Red when a switch back gives a sequence the engine's values or another's, a dense step decides by less than a
    request asked for, or one that joins amid dense steps decides by its own.
    """
    auto = pipelines(dtype='float32', max_batch_size=8)
    policy = Policy('auto', False)
    runner = chosen(auto, policy)
    runner.costs = costs(runner, kept=False)
    calls, seen = [], []

    def every_third(evicting_ms, dense_ms):
        calls.append(DENSE if len(calls) % 3 == 2 else policy.first)
        return calls[-1]

    def enter(*args, _original=step.enter):
        columns = runner.state.columns
        seen.append((runner.dense, [row for alive, *row in zip(
            columns.alive.tolist(), columns.alpha.tolist(), columns.threshold.tolist(),
            *runner.state.own[:runner.state.count].T.tolist(), strict=True) if alive]))
        _original(*args)

    monkeypatch.setattr(policy, 'choose', every_third)
    monkeypatch.setattr(step, 'enter', enter)
    knobs = [(1 + i / 8, .75 + i / 64) for i in range(13)]  # more than a batch: sequences come and go
    auto([item.prompt for item in demo_items[:13]],
         gen_config=[FocusGenerationConfig(max_new_tokens=40, do_sample=False, focus_alpha=alpha,
                                           confidence_threshold=threshold) for alpha, threshold in knobs])
    assert {(alpha, threshold) for _, rows in seen for *_, alpha, threshold in rows} == set(knobs)
    for dense, rows in seen:
        for alpha, threshold, own_alpha, own_threshold in rows:
            expected = (64.0, max(.9, own_threshold)) if dense else (own_alpha, own_threshold)
            assert (alpha, threshold) == expected
    after_dense = [rows for (before, _), (now, rows) in zip(seen, seen[1:], strict=False) if before and not now]
    assert len(after_dense) > 5 and {row[2] for rows in after_dense for row in rows} == {alpha for alpha, _ in knobs}


def test_writing_a_mode_is_not_of_every_step(pipelines, decode, demo_items, chosen, monkeypatch):
    """Red when a steady decode step writes what its sequences decide by."""
    auto = pipelines(dtype='float32', max_batch_size=8)
    runner = chosen(auto, Policy('auto', False))
    runner.costs = costs(runner, kept=False)
    written = []
    original = FocusState.decide_by
    monkeypatch.setattr(FocusState, 'decide_by', lambda *args: written.append(args) or original(*args))
    _, counted = spent(auto, lambda: decode(auto, [item.prompt for item in demo_items[:2]]))
    assert 1 <= len(written) <= 2 < counted['dense_steps'] / 4  # the prompts may be prefilled one by one


def test_an_engine_asks_its_policy(pipelines):
    """Red when the agent builds its runner without the option's policy."""
    for option, first in {'auto': True, 'always': True, 'never': False}.items():
        agent: FocusModelAgent = pipelines(focus_policy=option).async_engine.engine.executor.model_agent
        assert agent.policy.first.evicting is agent.runner.evicting is first
        assert agent.policy.adaptive is (option == 'auto')
