"""Thousands of steps leave nothing behind."""
import gc
import random

import pytest
import torch

from .streams import GPU, STOPS, config, left, run

# minutes on two cores; also what `-m gpu` runs
pytestmark = pytest.mark.slow


def _memory(pipe, device):
    """Live tensors, MiB of the process, MiB of the device; after a collection."""
    gc.collect()
    tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    with open('/proc/self/status') as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith('VmRSS')) / 1024
    on_device = torch.cuda.memory_allocated() / 2**20 if device == 'cuda' else 0.0
    reserved = torch.cuda.memory_reserved() / 2**20 if device == 'cuda' else 0.0
    return tensors, resident, on_device, reserved


@pytest.mark.parametrize('device, steps, prompts', [('cpu', 30, 3), pytest.param('cuda', 15_000, 256, marks=GPU)])
def test_memory_does_not_grow(engine, encoded, device, steps, prompts):
    """Round after round of the same requests, greedy and sampled, with stop words, aborts and more streams than places.

    Red when steps, requests or aborts leave tensors, host records or device memory behind.
    """
    pipe = engine(device)
    runner = pipe.async_engine.engine.executor.model_agent.runner
    own, requests, aborts = random.Random(3), [], []
    for number, ids in enumerate(encoded(prompts)):
        hot = {'temperature': 0.8, 'top_k': 20, 'random_seed': number} if number % 3 == 1 else {}
        requests.append((ids, config(12 if device == 'cpu' else 100, do_sample=bool(hot),
                                     stop_token_ids=[*STOPS, own.randrange(10, 4000)], **hot)))
        aborts.append(('cancel', own.randrange(3)) if number % 4 == 2 else None)
    seen, begun, holding = [], None, left(pipe)
    while begun is None or int(runner.view.pace.turn) - begun < steps:
        run(pipe, requests, aborts)
        assert left(pipe) == holding
        seen.append(_memory(pipe, device))
        if len(seen) == 2:
            begun = int(runner.view.pace.turn)
    early, late = seen[len(seen) // 3], seen[-1]
    print(f'{len(seen)} rounds, {steps} steps: tensors, MiB, MiB of the device, reserved: {early} -> {late}')
    assert len(seen) > 5
    assert late[0] <= early[0] + 8
    assert late[1] <= early[1] + (8 if device == 'cpu' else 48)
    assert late[2] <= early[2] + 1 and late[3] <= early[3] + 64
