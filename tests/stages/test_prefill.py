"""Prefill on a tiny decoder: the KV of prompts, block by block, against one sequence at a time."""
from dataclasses import replace

import pytest
import torch
from lmdeploy_focus.kernels.layout import Rows

from lmdeploy_focus.engine.graph_runner import GraphRunner
from lmdeploy_focus.engine.step_runner import StepRunner
from lmdeploy_focus.stages import prefill

from . import simulation
from .tiny_batch import FOCUS, make, start
from .tiny_decoder import LAYERS, VOCABULARY

PROMPTS = ([1], [3, 1, 2], [1, 7, 2, 1, 5])  # blocks of each


def prompts(blocks, length, page_size, room=None):
    """A batch, its prompts after texts of various lengths, and the same for the golden model."""
    random = torch.Generator().manual_seed(len(blocks))
    lives = start(FOCUS, length, len(blocks), seed=len(blocks))
    batch = make(lives, page_size, max(blocks) + 1, seed=1, room=room)
    return batch, batch.simulate(lives), [torch.randint(VOCABULARY, (own * length,), generator=random)
                                          for own in blocks]


def simulate(batch, own, ids, length):
    """Every block after the one before it, seeing itself and all before."""
    decoder, life = batch.model.decoder, own.life
    for begin in range(0, len(ids), length):
        positions = list(range(begin, begin + length))
        hidden, residual = decoder.embed(ids[None, begin:begin + length]), None
        for index in range(LAYERS):
            run = simulation.LayerRun(decoder, index, own, positions, hidden, residual)
            hidden, residual = run.finish(positions, life.history + begin + length)


@pytest.mark.parametrize('kind', [StepRunner, GraphRunner])
@pytest.mark.parametrize('blocks', PROMPTS, ids=str)
@pytest.mark.parametrize('length,page_size', [(4, 16), (8, 8), (16, 24)])
def test_keys_and_values_are_the_simulations(kind, blocks, length, page_size):
    """All layers of all prompts, with histories, where blocks fill pages or cross them; twice, the second time fewer.

    Red when: a block sees a later one, another prompt or too little of its own text; a row is stored in another's slot,
    or padding or a longer prefill before it is stored at all.
    """
    batch, golden, ids = prompts(blocks, length, page_size, room=32)
    options, width = replace(FOCUS, page_size=page_size), batch.page_table.size(1)
    parts = batch.model, options, True, batch.state
    runner = (StepRunner(*parts) if kind is StepRunner else
              GraphRunner(*parts, columns=width + 2, max_kv=(width + 2) * page_size, graphs=False))
    for chosen in (list(range(len(blocks))), [len(blocks) - 1]):
        history = torch.tensor([golden[s].life.history for s in chosen])
        assert runner.prefill(torch.cat([ids[s] for s in chosen]), torch.tensor([len(ids[s]) for s in chosen]), history,
                              batch.page_table[chosen])
        for s in chosen:
            simulate(batch, golden[s], ids[s], length)
        for s, own in enumerate(golden):
            for layer, texts in zip(batch.model.caches, own.caches, strict=True):
                for half, text in zip(layer, texts, strict=True):
                    torch.testing.assert_close(batch.text(half, s), text, rtol=1e-4, atol=1e-4)
        ids = [other.flip(0) for other in ids]


def test_rows():
    """Every field of two prompts. Red when: a row sees its text instead of its block, or a position starts anew."""
    rows = Rows.empty(3, 2, 9, 'cpu')
    for name in ('visible', 'input_ids', 'position_ids', 'pages'):
        getattr(rows, name).fill_(5)
    prefill.list_rows(rows, torch.tensor([7, 8, 9, 1, 2, 3]), torch.tensor([4, 2]), torch.tensor([2, 0]),
                      torch.tensor([[3, 4], [6, 0]]), 4, 2)
    expected = {'start': [0, 4, 6, 6], 'sequence': [0, 0, 0, 0, 1, 1], 'position_ids': [2, 3, 4, 5, 0, 1, 0, 0, 0],
                'input_ids': [7, 8, 9, 1, 2, 3, 0, 0, 0], 'pages': [3, 3, 4, 4, 6, 6, -1, -1, -1],
                'offsets': [2, 3, 0, 1, 0, 1], 'visible': [4, 4, 6, 6, 2, 2, 0, 0, 0]}
    for name, values in expected.items():
        assert getattr(rows, name)[:len(values)].tolist() == values, name


def test_a_prompt_longer_than_a_step():
    """Few sequences, long prompts: more rows than any step has. Red when: there is no bucket for them."""
    batch, golden, ids = prompts([1, 60, 1], 16, 64)
    runner = GraphRunner(batch.model, FOCUS, True, batch.state, batch.page_table.size(1), 10**4, graphs=False)
    assert len(ids[1]) > runner.largest
    history = torch.tensor([golden[1].life.history])
    assert runner.prefill(ids[1], torch.tensor([len(ids[1])]), history, batch.page_table[1:2])
    long = torch.zeros(2049, dtype=torch.int64)
    assert not runner.prefill(long, torch.tensor([2049]), history, batch.page_table[1:2])
