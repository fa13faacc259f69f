"""The Triton plan beside its twin, and the twin beside the stages that it sums up."""
import os
import subprocess
import sys

import pytest
import torch
from lmdeploy_focus.kernels import reference_plan

from lmdeploy_focus.stages import budget, compact, delayed_cache, select
from lmdeploy_focus.stages.state import FocusState, unpack_bits
from lmdeploy_focus.stages.view import MASKED, UNMASKED, entering_view

from . import plan_checks as checks

OPTIONS = pytest.mark.parametrize('options', checks.OPTIONS, ids=str)


def test_interpreter():
    """Red when: a rule of the selection differs from the twin's (threshold, ties, neighbour, placeholders, never
    empty), alpha is rounded to float32, bit 63 is taken for a sign, a row lands in another's place, what lies beyond N
    is not marked, or a sequence without rows gets one."""
    # the variable must be set before triton is imported, and this process builds engines
    done = subprocess.run([sys.executable, checks.__file__], env=os.environ | {'TRITON_INTERPRET': '1'},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('shape', [(1, 4, 1), (3, 16, 1), (17, 32, 1), (17, 64, 1)], ids=str)
@OPTIONS
def test_twin_is_the_stages(shape, options):
    """Red when: the twin's budget, selection, compaction or visible keys are not those of the stages, in any field."""
    for seed in range(4):
        arguments = checks.make(shape, 'cpu', seed, full=True)
        plan = reference_plan.plan(**arguments, **options)
        kept, index = staged(arguments, **options)
        number = kept.num_rows
        assert plan.total.tolist() == [number]
        assert plan.rows.tolist() == index.tolist() + [-1] * (plan.rows.numel() - number)
        for name in ('sequence', 'position', 'pages', 'offsets'):
            values = getattr(plan, name)
            assert values[:number].equal(getattr(kept, name)), name
            assert (values[number:] == -1).all(), name
        assert plan.masked[:number].equal(kept.masked) and not plan.masked[number:].any()
        for name in ('q_start', 'kv_len'):
            assert getattr(plan, name).equal(getattr(kept, name)), name
        assert plan.rightmost.equal(kept.rightmost())
        assert plan.candidates.equal(kept.candidates()[0])
        waiting = kept.masked.nonzero()[:, 0].tolist()
        assert plan.sampled.tolist() == waiting + [-1] * (plan.sampled.numel() - len(waiting))
        starts = plan.sampled_start.tolist()
        assert starts[0] == 0 and starts[-1] == len(waiting)
        for s in range(shape[0]):
            assert kept.sequence[plan.sampled[starts[s]:starts[s + 1]]].eq(s).all()
            assert checks.pack(torch.zeros(1, shape[1], dtype=torch.bool).index_fill(
                1, kept.position[kept.sequence == s], True)).item() == plan.kept[s]


def staged(arguments, keep=None, selection='top', sequential=0, kv_visible='progress'):
    """The kept view and its row indices, as `stages.step.denoise` makes them."""
    length, history = arguments['first'].size(2), arguments['history']
    entering, masked = (unpack_bits(arguments[name], length) for name in ('entering', 'masked'))
    state = FocusState(arguments['entering'], arguments['progress'], arguments['decoded'], arguments['steps'])
    view = entering_view(torch.zeros(masked.shape, dtype=torch.int64), entering,
                         torch.where(masked, MASKED, UNMASKED), history, arguments['page_table'],
                         arguments['page_size'], history, 0)
    rows, positions = view.candidates()
    delta = arguments['second'][:, 0] - arguments['first'][:, 0]
    allowed = budget.allot((rows >= 0).sum(1), state, arguments['alpha'], keep)  # alpha of each sequence
    stays = select.keep_rows(delta, rows, positions, allowed, view, state.progress, selection, keep is not None,
                             sequential)
    kept, index = compact.take(view, stays, view.kv_len)
    kept.kv_len = delayed_cache.visible(history, kept.rightmost(), state, kv_visible)
    return kept, index


@pytest.mark.gpu
@pytest.mark.parametrize('shape', checks.SMALL + checks.LARGE, ids=str)
@OPTIONS
def test_twin(shape, options):
    """Red when: as in the interpreter, or counts are added up wrongly beyond 512 sequences."""
    checks.check_twin(shape, options, 'cuda')


@pytest.mark.gpu
def test_edges():
    """Red when: the budget loses its slack, or the deviation is a sample's."""
    checks.check_edges('cuda')


@pytest.mark.gpu
def test_not_numbers():
    """Red when: NaN deltas empty a sequence or disturb another."""
    checks.check_not_numbers('cuda')


@pytest.mark.gpu
def test_refusals():
    """Red when: a wrapper lets through what its kernel cannot take."""
    checks.check_refusals('cuda')


@pytest.mark.gpu
def test_total_in_host_memory():
    """Red when: N cannot be written straight into pinned memory."""
    arguments = checks.make((17, 32, 8), 'cuda')
    out = checks.Plan.empty(17, 32, 'cuda')
    out.total = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    checks.plan(**arguments, out=out)
    torch.cuda.synchronize()
    assert out.total.item() == out.q_start[-1].item()
