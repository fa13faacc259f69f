"""A request's own alpha and confidence threshold, from its generation config to its row of state."""
import copy
import math
import pickle

import pytest
import torch
from lmdeploy import GenerationConfig
from lmdeploy.pytorch.messages import SamplingParam

from lmdeploy_focus import FocusEngineConfig, FocusGenerationConfig
from lmdeploy_focus.engine.knobs import FocusSamplingParam, own_knobs
from lmdeploy_focus.request import with_knobs

FP32 = {'dtype': 'float32', 'max_batch_size': 16}
KNOBS = [{}, {'focus_alpha': 3.0, 'confidence_threshold': .95}, {'focus_alpha': 1, 'confidence_threshold': .6}]
ALONE = [{'focus_alpha': 3.0}, {'confidence_threshold': .95}]
BAD = [('focus_alpha', .999), ('focus_alpha', -1), ('focus_alpha', math.nan), ('focus_alpha', math.inf),
       ('focus_alpha', '2'), ('focus_alpha', True), ('focus_alpha', [2]), ('confidence_threshold', 0),
       ('confidence_threshold', 1.001), ('confidence_threshold', -.5), ('confidence_threshold', math.nan),
       ('confidence_threshold', '0.9'), ('confidence_threshold', {})]
BOUND = {'focus_alpha': 'a finite number >= 1', 'confidence_threshold': 'above 0 and at most 1'}


def configs_of(knobs, **options):
    return [FocusGenerationConfig(**{'max_new_tokens': 64, 'do_sample': False, **options, **own}) for own in knobs]


def engine_options(own):
    """The same for all requests of an engine."""
    names = {'focus_alpha': 'focus_alpha', 'confidence_threshold': 'dllm_confidence_threshold'}
    return {names[name]: float(value) for name, value in own.items()}


@pytest.mark.parametrize('name, value', BAD, ids=str)
def test_bad_values(name, value):
    """Red when one is taken, or its message leaves out the parameter, the value or the bound."""
    with pytest.raises(ValueError) as told:
        FocusGenerationConfig(**{name: value})
    for part in (name, repr(value), BOUND[name]):
        assert part in str(told.value)


def test_config_and_parameters_on_their_way():
    """Red when a knob is lost by a copy, by pickle (an engine process) or by LMDeploy's conversion, a request without
    knobs gets anything but stock's parameters, or a field of stock's is lost."""
    FocusEngineConfig()  # puts the patches on
    config = FocusGenerationConfig(focus_alpha=2, confidence_threshold=.5, max_new_tokens=7, random_seed=3,
                                   stop_token_ids=[5])
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        param = SamplingParam.from_gen_config(same)
        assert (type(param), param.focus_alpha, param.confidence_threshold) == (FocusSamplingParam, 2.0, .5)
    stock = SamplingParam.from_gen_config(GenerationConfig(max_new_tokens=7, random_seed=3, stop_token_ids=[5]))
    assert type(stock) is SamplingParam and vars(param).items() >= vars(stock).items()


def test_knobs_of_a_batch():
    """Red when a default is not the engine's, an alpha beyond the longest block reaches the device, or precision is
    lost on the way."""
    params = [SamplingParam(), FocusSamplingParam(focus_alpha=1e300), FocusSamplingParam(confidence_threshold=.7),
              FocusSamplingParam(focus_alpha=1.1, confidence_threshold=1.0)]
    alpha, threshold = own_knobs(params, 1.5, .8)
    assert alpha.dtype == threshold.dtype == torch.float64
    assert (alpha.tolist(), threshold.tolist()) == ([1.5, 64.0, 1.5, 1.1], [.8, .8, .7, 1.0])


def test_a_mixed_batch_decodes_what_engines_with_these_options_do(pipelines, decode, demo_items):
    """Sequence for sequence the very tokens, in fp32. Red when a knob does not reach its row, reaches another's, or is
    given up for the engine's own amid a batch in which sequences come and go."""
    prompts, limit = [item.prompt for item in demo_items[:9]], 36
    mixed = pipelines(**FP32)
    answers = [list(answer.token_ids)
               for answer in mixed(prompts, gen_config=configs_of(KNOBS * 3, max_new_tokens=limit))]
    default = decode(mixed, prompts, max_new_tokens=limit)
    assert answers[::3] == default[::3]
    for index in (1, 2):
        engine = pipelines(**FP32, **engine_options(KNOBS[index]))
        assert answers[index::3] == decode(engine, prompts[index::3], max_new_tokens=limit)
        assert answers[index::3] != default[index::3], 'the knobs make no difference to these prompts'


@pytest.fixture
def rows_seen(monkeypatch):
    """(output start, alpha, threshold) of all rows that ran in any step: whose they were, and what they decided by."""
    from lmdeploy_focus.engine.step_runner import StepRunner
    seen, original = set(), StepRunner.forward

    def forward(self, page_table, stop_words):
        columns = self.state.columns
        rows = zip(columns.alive.tolist(), columns.output_start.tolist(), columns.alpha.tolist(),
                   columns.threshold.tolist(), strict=True)
        seen.update(tuple(rest) for alive, *rest in rows if alive)
        original(self, page_table, stop_words)

    monkeypatch.setattr(StepRunner, 'forward', forward)
    return seen


@pytest.fixture
def preempted(monkeypatch):
    """The sequences that were preempted."""
    from lmdeploy.pytorch.paging.scheduler import Scheduler
    found, original = [], Scheduler.preempt_seqs

    def preempt_seqs(self, seqs):
        found.extend(seqs)
        return original(self, seqs)

    monkeypatch.setattr(Scheduler, 'preempt_seqs', preempt_seqs)
    return found


def test_a_preempted_sequence_keeps_its_own(pipelines, demo_items, rows_seen, preempted):
    """Eight requests with knobs of their own each, and pages for half. Red when a sequence that is prefilled again
    comes back with the engine's knobs or another's."""
    pipe = pipelines(dtype='float32', num_gpu_blocks=16)
    by_length = {}
    for item in demo_items:  # the length of its prompt tells whose row is seen
        ids = pipe.async_engine.tokenizer.model.model.apply_chat_template(
            [{'role': 'user', 'content': item.prompt}], add_generation_prompt=True, return_dict=False)
        by_length.setdefault(len(ids), item.prompt)
    by_length = dict(list(by_length.items())[:8])
    assert len(by_length) == 8
    knobs = [{'focus_alpha': 1 + i / 8, 'confidence_threshold': .5 + i / 32} for i in range(8)]
    answers = pipe(list(by_length.values()), gen_config=configs_of(knobs, max_new_tokens=100, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [100] * 8
    assert preempted, 'the test means nothing unless sequences are preempted'
    assert rows_seen == {(length, own['focus_alpha'], own['confidence_threshold'])
                         for length, own in zip(by_length, knobs, strict=True)}


def test_each_turn_has_its_own(pipelines, demo_items, rows_seen):
    """Three turns of one sequence of the engine, then three of a pipeline's session. Red when a turn decides by the
    knobs of the turn before, or loses its own."""
    from lmdeploy.pytorch.engine.request import RequestType
    pipe = pipelines(**FP32)
    tokenizer = pipe.async_engine.tokenizer.model.model
    given = [{'focus_alpha': 2.0, 'confidence_threshold': .7}, {}, {'focus_alpha': 1.25}]
    expected = [(2.0, .7), (1.5, .8), (1.25, .8)]

    async def turns():
        engine = pipe.async_engine.engine
        sender = engine.create_instance().req_sender
        sender.send_async(RequestType.ADD_SESSION, {'session_id': 987_655, 'response': False})
        for own, item in zip(given, demo_items, strict=False):
            param = SamplingParam.from_gen_config(configs_of([own], max_new_tokens=20, top_k=1)[0])
            response = sender.send_async(RequestType.ADD_MESSAGE, {
                'token_ids': tokenizer.encode(item.prompt), 'session_id': 987_655, 'sampling_param': param,
                'adapter_name': None})
            while (response := await sender.async_recv(response, wait_main=True)).type.name == 'SUCCESS':
                pass
        engine.end_session(987_655)

    pipe._run(coro=turns()).result()
    assert [tuple(rest) for _, *rest in sorted(rows_seen)] == expected
    rows_seen.clear()
    session = None
    for own, item in zip(given, demo_items, strict=False):
        session = pipe.chat(item.prompt, session=session, gen_config=configs_of([own], max_new_tokens=20)[0])
    assert [tuple(rest) for _, *rest in sorted(rows_seen)] == expected


def test_engines_without_focus():
    """Of a drafter, for one. Red when one takes a knob, says anything but what it needs, or refuses none at all."""
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.serve.core.exceptions import RequestError
    for own in ALONE:
        with pytest.raises(RequestError, match='it needs an engine with --focus') as told:
            with_knobs(configs_of([own])[0], PytorchEngineConfig())
        assert told.value.status_code == 400
    for config in (GenerationConfig(), FocusGenerationConfig()):
        assert with_knobs(config, PytorchEngineConfig()) is config


@pytest.mark.parametrize('options, refused, why', [
    ({'focus': False, 'dllm_confidence_threshold': .9}, ALONE, '--focus'),
    ({'focus_policy': 'never'}, [{'focus_alpha': 2.0}], '--focus-policy never'),
    ({'focus_keep': 32}, [{'focus_alpha': 2.0}], '--focus-keep 32'),
    ({'dllm_unmasking_strategy': 'sequential'}, [{'confidence_threshold': .9}], '--dllm-unmasking-strategy sequential'),
], ids=str)
def test_knobs_without_effect_are_refused(pipelines, demo_items, options, refused, why):
    """Red when an engine takes a knob that it does not look at, refuses one that it does, or a refusal leaves it
    unable to answer."""
    pipe = pipelines(dtype='float32', **options)
    prompt = demo_items[0].prompt
    for own in refused:
        answer = pipe(prompt, gen_config=configs_of([own])[0])
        assert (answer.finish_reason, answer.error_code) == ('error', 'unsupported_feature')
        name = next(iter(own))
        assert f'{name}={float(own[name])}' in answer.error_message and why in answer.error_message
    taken = [{}]
    if options.get('focus', True):
        taken += [{name: 1.0} for name in ('focus_alpha', 'confidence_threshold') if name not in refused[0]]
    for own in taken:
        assert pipe(prompt, gen_config=configs_of([own], max_new_tokens=4)[0]).token_ids


def test_a_value_that_went_bad_later(pipelines, demo_items):
    """Red when a field that is set after the config was made reaches the engine unchecked."""
    config = FocusGenerationConfig(focus_alpha=2.0)
    config.focus_alpha = .5
    answer = pipelines(**FP32)(demo_items[0].prompt, gen_config=config)
    assert answer.error_code == 'invalid_request'
    assert answer.error_message == 'focus_alpha=0.5 is not possible: it must be a finite number >= 1.'
