"""The rows of group 'cpu': they act for a CPU engine and for nothing else."""
import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from lmdeploy.messages import PytorchEngineConfig
from lmdeploy.pytorch.backends import get_backend
from lmdeploy_focus.patches import apply, cpu

from lmdeploy_focus.cpu import stand_ins
from lmdeploy_focus.cpu.agent import own_copy, to_cpu
from lmdeploy_focus.cpu.scope import cpu_scope, on_cpu

ROW = {row.name: row for row in cpu.ROWS}
STAND_INS = {row.target.partition(':')[2]: row for row in cpu.ROWS if row.target.startswith('torch.cuda:')}


class Recorder:
    """Stands for an upstream function: keeps its arguments, returns itself."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self

    __wrapped__ = staticmethod(lambda *args, **kwargs: 'eager')


# A call of another engine, and one of a CPU engine, for each chooser.
STOCK_CONFIG, CPU_CONFIG = PytorchEngineConfig(device_type='cuda'), SimpleNamespace(device_type='cpu')
STOCK_CALLS = {
    'cpu-backend': ((), {}),
    'cpu-kv-memory': (('plan', ), {'num_logical_blocks': 3, 'device': 'cuda'}),
    'cpu-state-memory': (('specs', ), {'num_caches': 3, 'device': 'cuda'}),
    'cpu-step-inputs': (('inputs', ), {'non_blocking': True}),
    'cpu-rotary': ((torch.empty(1, device='meta'), 'inv_freq'), {'dtype': torch.float16}),
    'cpu-bf16': (('cuda', ), {}),
    'cpu-bf16-check': (('cuda', ), {}),
    'cpu-checker': ((), {'model_path': 'm', 'engine_config': STOCK_CONFIG, 'trust_remote_code': True, 'logger': None}),
}


def test_every_chooser_is_tested():
    """Red when a row is added without a call of a stock engine here."""
    assert STOCK_CALLS.keys() == ROW.keys() - {row.name for row in STAND_INS.values()}


@pytest.mark.parametrize('name', STOCK_CALLS)
def test_another_engine_gets_the_original(name):
    """Red when a row changes an argument or the result for a stock engine, or keeps the call to itself."""
    args, kwargs = STOCK_CALLS[name]
    original = Recorder()
    assert ROW[name].make(original)(*args, **kwargs) is original
    assert original.calls == [(args, kwargs)]


@pytest.mark.parametrize('name', ['cpu-kv-memory', 'cpu-state-memory'])
@pytest.mark.parametrize('device,becomes', [('cuda', 'cpu'), ('cpu', 'cpu'), ('meta', 'meta')])
def test_memory_of_a_cpu_engine(name, device, becomes):
    """Red when the KV cache is asked of a GPU, or measuring it allocates it."""
    original = Recorder()
    with cpu_scope():
        ROW[name].make(original)('x', device=device)
    assert original.calls == [(('x', ), {'device': becomes})]


def test_choices_of_a_cpu_engine():
    """Red when a chooser does not choose."""
    original = Recorder()
    with cpu_scope():
        assert ROW['cpu-backend'].make(original)().get_name() == 'cpu'
        value = torch.zeros(2)
        assert ROW['cpu-step-inputs'].make(original)(value).data_ptr() != value.data_ptr()
        assert ROW['cpu-step-inputs'].make(original)(None) is None
    assert ROW['cpu-rotary'].make(original)(torch.zeros(1), 'inv_freq') == 'eager'
    assert ROW['cpu-bf16'].make(original)('cpu') is True
    assert original.calls == []


def test_the_backend_that_lmdeploy_chooses():
    """Red when stock engines get our backend, or when LMDeploy's own device argument is not enough to get it."""
    apply(cpu.ROWS)
    assert get_backend('cpu').get_name() == 'cpu'
    assert get_backend('cuda').get_name() == 'cuda'
    assert get_backend().get_name() == 'cuda'
    with cpu_scope():
        assert get_backend().get_name() == 'cpu'
    assert get_backend('cpu').ccl_backend() == 'gloo'


def test_stand_ins_are_absent_where_there_is_a_gpu(monkeypatch):
    """Red when a process with a GPU loses its streams."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    for name, row in STAND_INS.items():
        original = object()
        assert row.make(original) is original, name


def test_stand_ins_where_there_is_none(monkeypatch):
    """Red when a name has no stand-in, or one blocks, raises or reports pending work."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    names = {name: row.make(None) for name, row in STAND_INS.items()}
    assert names == {name: getattr(stand_ins, name) for name in STAND_INS}
    stream, event = names['Stream'](), names['Event'](enable_timing=True)
    # The cache engine asserts that its stream is not the current one.
    assert stream != names['current_stream']()
    with names['stream'](stream):
        event.record()
        event.record(stream)
        stream.wait_event(event)
        stream.wait_stream(stream)
    event.wait()
    event.synchronize()
    names['synchronize']()
    stream.synchronize()
    assert event.query() and stream.query() and stream.record_event().query()
    assert stream.record_event(event) is event


def test_scope_belongs_to_a_task_or_a_thread():
    """Red when one engine's scope is seen by another's work: by a task that runs while the first waits, by another
    thread, or after it was left."""
    seen = {}

    async def engine(name, inside, first, second):
        if inside:
            with cpu_scope():
                first.set()
                await second.wait()
                seen[name] = on_cpu()
        else:
            await first.wait()
            seen[name] = on_cpu()
            second.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(engine('cpu', True, *events), engine('stock', False, *events))

    asyncio.run(both())
    with cpu_scope():
        thread = threading.Thread(target=lambda: seen.update(thread=on_cpu()))
        thread.start()
        thread.join()
    seen['after'] = on_cpu()
    assert seen == {'cpu': True, 'stock': False, 'thread': False, 'after': False}


def test_a_step_owns_its_inputs_and_outputs():
    """Red when the host and the model share a tensor: either could change what the other still reads."""
    from lmdeploy.pytorch.engine.logits_process import SamplingInputs
    from lmdeploy.pytorch.engine.model_agent.agent import BatchedOutputs
    from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraOutputs
    inputs = SamplingInputs(temperature=torch.ones(2), max_top_k=3, logits_processors=[[]])
    taken = to_cpu(inputs)
    outputs = BatchedOutputs(next_token_ids=torch.ones(2), stopped=None, new_token_timestamp=5,
                             extra_outputs=DLLMExtraOutputs(dllm_mask=torch.ones(2)))
    given = own_copy(outputs)
    inputs.temperature.zero_()
    outputs.next_token_ids.zero_()
    outputs.extra_outputs.dllm_mask.zero_()
    assert taken.temperature.tolist() == [1, 1] and taken.max_top_k == 3
    assert given.next_token_ids.tolist() == [1, 1] and given.stopped is None and given.new_token_timestamp == 5
    assert type(given.extra_outputs) is DLLMExtraOutputs and given.extra_outputs.dllm_mask.tolist() == [1, 1]
