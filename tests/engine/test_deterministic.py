"""With focus_deterministic, company in the batch never changes what is kept or decoded."""
import random

import pytest

ANSWER = 40


@pytest.fixture
def histories(monkeypatch):
    """Kept sets of every step by sequence: {output start: [(block start, step, map of kept positions), ...]}."""
    from lmdeploy_focus.kernels.layout import state_columns

    from lmdeploy_focus.engine.graph_runner import GraphRunner
    from lmdeploy_focus.engine.step_runner import StepRunner
    seen = {}

    def record(runner):
        count = runner.state.count
        state = state_columns(runner.view.table[:count].cpu(), runner.view.length)
        for row, kept in enumerate(runner.view.plan.current[:count].tolist()):
            if kept:  # a sequence that waits for the next step keeps nothing in this one
                step = int(state.history[row]), int(state.steps[row]), kept
                seen.setdefault(int(state.output_start[row]), []).append(step)

    for runner_class in (StepRunner, GraphRunner):

        def decide(self, draw, original=runner_class.decide):
            record(self)
            return original(self, draw)

        monkeypatch.setattr(runner_class, 'decide', decide)
    return seen


@pytest.mark.parametrize('device, trials', [pytest.param('cpu', 3, marks=pytest.mark.slow),
                                            pytest.param('cuda', 200, marks=pytest.mark.gpu)])
def test_one_prompt_in_any_company(device, trials, pipelines, decode, demo_items, histories):
    """Red when a matrix product, attention's split or a sum depends on the other rows of a step."""
    pipe = pipelines(device_type=device, focus_deterministic=True, focus_policy='always')
    subject, *others = [item.prompt for item in demo_items]
    alone = decode(pipe, [subject], max_new_tokens=ANSWER)[0]
    (start, expected), = histories.items()
    rng = random.Random(0)
    for trial in range(trials):
        histories.clear()
        company = rng.sample(others, rng.choice([1, 2, 3, 5] if device == 'cpu' else [1, 7, 15, 31, 62]))
        place = rng.randrange(len(company) + 1)
        answers = decode(pipe, [*company[:place], subject, *company[place:]], max_new_tokens=ANSWER)
        assert answers[place] == alone, trial
        # another prompt may be as long as this one: all steps of this one are there
        assert set(expected) <= set(histories[start]), trial
