"""A second turn of a conversation, and a prefill after preemption, start a block with fresh state."""
import pytest
import torch

# exact KV: what is decoded does not depend on the way there
WHOLE = {'focus_policy': 'never', 'focus_cache': 'off'}


def check_fresh(state, count):
    """The newest `count` sequences of a state are at the start of a block."""
    assert state.count >= count
    newest = {name: value[state.count - count:] for name, value in vars(state.columns).items()}
    assert newest['uncached'].eq(-1).all()
    assert newest['progress'].eq(-1).all()
    assert newest['alive'].all()
    for name in ('pending', 'decoded', 'steps'):
        assert not newest[name].any()


@pytest.fixture
def merged(monkeypatch):
    """The states that prefill hands to decoding, one a merged batch, checked to be fresh."""
    from lmdeploy_focus.engine.step_inputs import FocusStepInputs
    seen = []
    original = FocusStepInputs.merge_prefill

    def merge_prefill(self, inputs, *args):
        original(self, inputs, *args)
        seen.append(inputs.seq_length.numel())
        check_fresh(self.state, seen[-1])

    monkeypatch.setattr(FocusStepInputs, 'merge_prefill', merge_prefill)
    return seen


def _turns(pipe, turns, limit):
    """Tokens that one session of the engine generates, turn by turn: the messages of an instance, without its end."""
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.request import RequestType
    from lmdeploy.pytorch.messages import SamplingParam

    async def run():
        engine = pipe.async_engine.engine
        sender = engine.create_instance().req_sender
        sender.send_async(RequestType.ADD_SESSION, {'session_id': 987_654, 'response': False})
        answers = []
        for ids in turns:
            params = SamplingParam(max_new_tokens=limit, top_k=1, temperature=1.0)
            response = sender.send_async(RequestType.ADD_MESSAGE,
                                         {'token_ids': ids, 'session_id': 987_654, 'sampling_param': params,
                                          'adapter_name': None})
            while True:
                response = await sender.async_recv(response, wait_main=True)
                if response.type != ResponseType.SUCCESS:
                    break
            assert response.type == ResponseType.FINISH
            answers.append(response.data['token_ids'].tolist())
        engine.end_session(987_654)
        return answers

    return pipe._run(coro=run()).result()


@pytest.mark.parametrize('options', [WHOLE, {}], ids=['whole blocks', 'focus'])
@pytest.mark.parametrize('limit', [16, 37, 64])
def test_second_turn(pipelines, demo_items, merged, options, limit):
    """The second turn continues as if all that came before were its prompt, at every place of a block.

    Red when it begins with the first turn's freezing, progress or statistics, or when tokens behind the cap stay in the
    history. With frozen KV in the history near-ties may go another way, so equality is asked of whole blocks only.
    """
    pipe = pipelines(dtype='float32', **options)
    tokenizer = pipe.async_engine.tokenizer.model.model
    first = tokenizer.apply_chat_template([{'role': 'user', 'content': demo_items[0].prompt}],
                                          add_generation_prompt=True, return_dict=False)
    second = tokenizer.encode('\nNext question. ' + demo_items[20].prompt, add_special_tokens=False)
    one, two = _turns(pipe, [first, second], limit)
    assert len(one) == len(two) == limit
    assert len(merged) == 2
    if options == WHOLE:
        assert two == _turns(pipe, [first + one + second], limit)[0]


def _generate(pipe, prompts, limit):
    from lmdeploy import GenerationConfig
    config = GenerationConfig(max_new_tokens=limit, do_sample=False, ignore_eos=True)
    return [list(answer.token_ids) for answer in pipe(prompts, gen_config=config)]


@pytest.fixture
def preempted(monkeypatch):
    """How many sequences were preempted."""
    from lmdeploy.pytorch.paging.scheduler import Scheduler
    count = []
    original = Scheduler.preempt_seqs

    def preempt_seqs(self, seqs):
        count.extend(seqs)
        return original(self, seqs)

    monkeypatch.setattr(Scheduler, 'preempt_seqs', preempt_seqs)
    return count


@pytest.mark.parametrize('options', [WHOLE, {}], ids=['whole blocks', 'focus'])
def test_preemption(pipelines, demo_items, merged, preempted, options):
    """With KV pages for a third of the demand, every request ends with all of its tokens and no page is lost.

    Red when a preempted sequence comes back with stale state, or decodes other tokens than with ample memory (asked of
    whole blocks, whose KV does not depend on the way).
    """
    prompts, limit = [item.prompt for item in demo_items[:12]], 130
    scarce = pipelines(dtype='float32', num_gpu_blocks=16, **options)
    manager = scarce.async_engine.engine.scheduler.block_manager
    free = manager.get_num_free_gpu_blocks()
    answers = _generate(scarce, prompts, limit)
    assert preempted, 'the test means nothing unless sequences are preempted'
    assert len(merged) > 1
    assert [len(answer) for answer in answers] == [limit] * len(prompts)
    if options == WHOLE:
        assert answers == _generate(pipelines(dtype='float32', **options), prompts, limit)
    assert manager.get_num_free_gpu_blocks() == free


@pytest.mark.parametrize('name,value', [('uncached', 14), ('progress', 3), ('pending', 8), ('decoded', 1), ('steps', 1),
                                        ('alive', 0)])
def test_the_fixture_sees_stale_state(name, value):
    """Red when: the check above could not fail: a state after some steps is not fresh."""
    from lmdeploy_focus.stages.state import FocusState, first_rows
    state, one = FocusState(3, 4, 'cpu'), torch.ones(2, dtype=torch.int64)
    state.append(first_rows(one[:, None].repeat(1, 4), one[:, None].repeat(1, 4) > 0, one, one, one, one, 1.5, .8))
    check_fresh(state, 2)
    getattr(state.columns, name)[1] = value
    with pytest.raises(AssertionError):
        check_fresh(state, 1)
