"""The Triton enter beside its twin, and the twin beside the stages."""
import os
import subprocess
import sys

import pytest
import torch
from lmdeploy_focus.kernels import reference_enter

from lmdeploy_focus.stages import delayed_cache
from lmdeploy_focus.stages.state import FocusState, unpack_bits
from lmdeploy_focus.stages.view import CACHED, MASKED, UNMASKED, entering_view

from . import enter_checks as checks

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)


def test_interpreter():
    """Red when: a rule of the delayed cache differs from the twin's, a sequence beyond the count enters a row, bits
    beyond the block or bit 63 count, or a row lands in another's place or with another's token."""
    # the variable must be set before triton is imported, and this process builds engines
    done = subprocess.run([sys.executable, checks.__file__], env=os.environ | {'TRITON_INTERPRET': '1'},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('shape', [(1, 4), (3, 16), (17, 32), (17, 64)], ids=str)
@OPTIONS
def test_twin_is_the_stages(shape, options):
    """Red when: the twin's rows, candidates or visible keys are not those of the stages, in any field."""
    for seed in range(8):
        arguments = checks.make(shape, 'cpu', seed)
        entered = reference_enter.enter(**arguments, **options)
        waiting, held = (unpack_bits(arguments[name], shape[1]) for name in ('masked', 'cached'))
        mask = torch.where(waiting, MASKED, torch.where(held, CACHED, UNMASKED))
        state = FocusState(arguments['uncached'], arguments['progress'], arguments['progress'], arguments['progress'])
        entering = delayed_cache.entering(state, mask, options.get('cache', 'delayed-neighbour'),
                                          options.get('full_commit', False))
        history = arguments['history']
        view = entering_view(arguments['ids'], entering, mask, history, arguments['page_table'],
                             arguments['page_size'], history, 0)
        number = view.num_rows
        for name in ('sequence', 'position', 'input_ids', 'position_ids', 'masked', 'pages', 'offsets'):
            assert getattr(entered, name)[:number].equal(getattr(view, name)), name
        assert entered.rows[:number].equal(torch.arange(number)) and (entered.rows[number:] == -1).all()
        assert entered.kept.equal(checks.pack(entering)) and entered.total.tolist() == [number]
        assert entered.q_start.equal(view.q_start) and entered.rightmost.equal(view.rightmost())
        assert entered.candidates.equal(view.candidates()[0])
        assert entered.kv_len.equal(delayed_cache.visible(history, view.rightmost(), state,
                                                          options.get('kv_visible', 'progress')))


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter, or counts are added up wrongly beyond 512 sequences."""
    checks.check_twin(shape, options, 'cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')
