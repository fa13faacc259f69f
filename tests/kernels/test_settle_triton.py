"""The Triton settle beside its twin, and the twin beside the stages, step inputs and stopping criteria."""
import os
import subprocess
import sys

import pytest
import torch
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy_focus.kernels import reference_settle

from lmdeploy_focus.engine.step_inputs import FocusExtraInputs, FocusExtraOutputs, FocusStepInputs
from lmdeploy_focus.engine.stopping import FocusStoppingCriteria
from lmdeploy_focus.stages import delayed_cache
from lmdeploy_focus.stages.state import FocusState, unpack_bits
from lmdeploy_focus.stages.unmask import UnmaskRule, unmask
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED, entering_view

from . import settle_checks as checks

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)


def test_interpreter():
    """Red when: a rule of unmasking, freezing, committing or stopping differs from the twin's, NaN is decided before a
    number, a tie goes to the right, bit 63 is taken for a sign, a sequence without rows changes, a position reads
    another's sample, or the kernel cannot write to its own input."""
    # the variable must be set before triton is imported, and this process builds engines
    done = subprocess.run([sys.executable, checks.__file__], env=os.environ | {'TRITON_INTERPRET': '1'},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('shape', [(1, 4), (3, 16), (17, 32), (17, 64)], ids=str)
@OPTIONS
def test_twin_is_the_engine(shape, options):
    """Red when: the twin differs from unmasking, the delayed cache, LMDeploy's step inputs, FocusState.restart or the
    stopping criteria in any value."""
    for seed in range(12):
        arguments = checks.make(shape, 'cpu', seed, idle=False)
        settled = reference_settle.settle(**arguments, **options)
        ids, mask, state, inputs, stopped, stop_pos = engine(arguments, **options)
        assert settled.ids.equal(ids) and settled.mask.equal(mask)
        assert settled.stopped.equal(stopped) and settled.stop_pos.equal(stop_pos)
        after, extra = settled.next, inputs.extra_inputs
        assert after.ids.flatten().equal(inputs.model_inputs.input_ids.flatten())
        expected_mask = extra.dllm_mask.view(shape)
        assert after.masked.equal(checks.pack(expected_mask == MASKED))
        assert after.cached.equal(checks.pack(expected_mask == CACHED))
        for name in ('uncached', 'progress', 'decoded', 'steps'):
            assert getattr(after, name).equal(getattr(extra.state, name)), name
        assert after.history.equal(inputs.model_inputs.history_lengths)
        assert after.appendable.equal(inputs.stopping_criteria.num_appendable_ids)
        assert after.random_offsets.equal(inputs.sampling_delta.random_offsets)
        assert settled.newly.equal(state.decoded - arguments['blocks'].decoded)
        for name, rows in (('entering', settled.entered), ('kept', settled.kept)):
            assert rows.equal(unpack_bits(arguments[name], shape[1]).sum(1))


def engine(arguments, strategy, tokens_per_step, cache):
    """Ids, mask and state after a step, the next inputs and the stops, as the model agent makes them."""
    blocks, length = arguments['blocks'], arguments['blocks'].ids.size(1)
    waiting, held, kept = (unpack_bits(flags, length) for flags in (blocks.masked, blocks.cached, arguments['kept']))
    mask = torch.where(waiting, MASKED, torch.where(held, CACHED, UNMASKED)).to(torch.uint8)
    state = FocusState(blocks.uncached, blocks.progress, blocks.decoded, blocks.steps)
    table = torch.zeros(len(mask), 99, dtype=torch.int64)
    view = entering_view(blocks.ids, kept, mask, blocks.history, table, length, blocks.history, 0)
    rows = (view.sequence * length + view.position)[view.masked]
    sampled = slice(0, len(rows))
    thresholds = arguments['threshold']
    results = []
    for threshold in thresholds.unique().tolist():  # the stages take one threshold for the batch
        rule = UnmaskRule(strategy, threshold, -(-length // tokens_per_step))
        object.__setattr__(rule, 'tokens_per_step', lambda _: tokens_per_step)
        new_ids, new_mask = unmask(blocks.ids, mask, rows, arguments['tokens'][sampled], arguments['scores'][sampled],
                                   rule)
        results.append((threshold, (new_ids, new_mask, delayed_cache.advance(state, mask, new_mask, view.rightmost(),
                                                                             cache))))
    ids, new_mask, new_state = results[0][1]
    for threshold, (other_ids, other_mask, other_state) in results[1:]:
        own = thresholds == threshold
        ids, new_mask = torch.where(own[:, None], other_ids, ids), torch.where(own[:, None], other_mask, new_mask)
        new_state = FocusState(*(torch.where(own, getattr(other_state, name), getattr(new_state, name))
                                 for name in ('uncached', 'progress', 'decoded', 'steps')))
    inputs = ModelInputs(input_ids=blocks.ids.view(1, -1), seq_length=torch.full_like(blocks.history, length),
                         history_lengths=blocks.history, block_offsets=table, is_decoding=True,
                         num_ignored_history=torch.zeros_like(blocks.history), max_q_seqlen=length, max_kv_seqlen=9999,
                         sum_kv_seqlen=9999)
    extra = FocusExtraInputs(new_mask.flatten(), arguments['output_start'], new_state)
    criteria = FocusStoppingCriteria(blocks.appendable, arguments['output_start'])
    stopped, stop_pos, criteria = criteria.step(ids.flatten(), arguments['stop_words'], inputs, extra)
    after = FocusStepInputs(_block_size=length, _dllm_mask_token=checks.MASK_TOKEN)
    after.step_decode(inputs, extra, criteria, SamplingInputsDelta(random_offsets=blocks.random_offsets),
                      ids.flatten(), None, FocusExtraOutputs(new_mask.flatten()))
    return ids, new_mask, new_state, after, stopped, stop_pos


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter."""
    checks.check_twin(shape, options, 'cuda')


@pytest.mark.gpu
def test_stops():
    """Red when: of cap and stop word the later one wins, or a stop word before the output counts."""
    checks.check_stops('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
