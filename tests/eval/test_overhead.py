"""The breakdown of a step's time by stage, from a profile's kernel names."""
import json
from pathlib import Path

import pytest

from eval import throughput
from eval.study import overhead

from .conftest import ROOT

# as an H200 names them (torch 2.11, triton 3.6): name, calls and microseconds a step, and the stage
KERNELS = [
    ('nvjet_sm90_tst_192x64_64x6_2x1_v_bz_TNT', 36, 1000, 'matrix products'),
    ('void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::P)', 36, 50, 'matrix products'),
    ('Memset (Unknown)', 41, 30, 'matrix products'),
    ('_attend_kernel', 36, 200, 'attention'), ('_reduce_kernel', 36, 100, 'attention'),
    ('_work_kernel', 2, 3, 'attention'),
    ('add_rms_norm_kernel', 73, 90, 'norms and activations'), ('_silu_and_mul_kernel', 36, 40, 'norms and activations'),
    ('_norm_rope_fill_kernel', 36, 30, 'norms and activations'),
    ('triton_poi_fused__to_copy_cos_expand_mul_repeat_sin_transpose_unsqueeze_0', 1, 4, 'norms and activations'),
    ('_partial_kernel', 2, 12, 'importance'), ('_keep_kernel', 1, 3, 'selection'), ('_rows_kernel', 1, 4, 'selection'),
    ('_enter_kernel', 1, 3, 'selection'), ('_compact_kernel', 1, 2, 'compaction'), ('memcpy128', 2, 9, 'compaction'),
    ('memcpy32_post', 5, 7, 'compaction'), ('Memcpy DtoD (Device -> Device)', 2, 2, 'compaction'),
    ('Memcpy DtoH (Device -> Pageable)', 1, 3, 'read-back'), ('Memcpy HtoD (Pinned -> Device)', .6, 1, 'read-back'),
    ('_settle_kernel', 1, 4, 'settle'), ('_part_kernel', 1, 4, 'head'), ('_row_kernel', 1, 2, 'head'),
    ('_candidate_kernel', 1, 12, 'head'), ('_chunk_kernel', 1, 5, 'head'), ('_draw_kernel', 1, 10, 'head'),
    ('_flash_prefill_fwd_kernel', .1, 50, 'prefill'), ('_fill_kv_cache_kernel', .1, 11, 'prefill'),
    ('_flatten_kv_cache', .1, 10, 'prefill'), ('apply_rotary_pos_emb_qk_kernel', .1, 10, 'prefill'),
    ('ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)', 72, 20, 'communication'),
    ('void at::native::reduce_kernel<512, 1, at::native::ReduceOp<long, at::native::sum_functor> >()', 1, 2, 'other'),
    ('void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)', 4, 7, 'other')]


def profile(scale: float = 1.0) -> dict:
    """As `Profile.write` writes it; a step of 2 ms, a tenth of it idle."""
    kernels = [{'name': name, 'calls_per_step': calls, 'us_per_step': scale * micros}
               for name, calls, micros, _ in KERNELS]
    return {'steps': 10, 'ms_per_step': 2.0, 'busy': 0.9, 'kernels': kernels}


@pytest.mark.parametrize('name, stage', [(name, stage) for name, _, _, stage in KERNELS])
def test_the_stage_of_a_kernel(name, stage):
    """Red when a name is taken for another stage's, such as torch's own reduce_kernel for attention's."""
    assert overhead.stage_of(name) == stage


def test_every_kernel_of_ours_has_a_stage():
    """Red when a kernel is renamed, or a new one counts as `other`."""
    source = ''.join(file.read_text() for file in (ROOT / 'triton_kernels').glob('*.py'))
    launched = {line.split('[')[0].split()[-1] for line in source.splitlines() if '_kernel[' in line}
    assert len(launched) > 10
    # the step runs importance by key head and the fused write of the cache; the other two serve tests alone
    for name in launched - {'_fill_kernel'}:
        assert overhead.stage_of(name) != 'other', name


def test_the_sums():
    """Red when a kernel is lost or counted twice, the idle time is not the step's, or a stage is no overhead."""
    found = overhead.breakdown(profile())
    micros = found['us_per_step']
    assert sum(value for stage, value in micros.items() if stage != 'host') == sum(kernel[2] for kernel in KERNELS)
    assert (micros['importance'], micros['selection'], micros['compaction'], micros['read-back']) == (12, 10, 20, 4)
    assert micros['host'] == pytest.approx(200) and found['share']['importance'] == 0.006
    assert found['overhead'] == 0.023 and found['overhead_and_host'] == 0.123
    shown = overhead.table({'focus-64': found})
    for text in ('importance', '12 ( 0.60%)', '2000', '2.3%', '12.3%'):
        assert text in shown


def test_a_profile_of_a_cpu():
    """Red when operators of a CPU are taken for kernels, and FOCUS for free."""
    with pytest.raises(ValueError, match='CPU'):
        overhead.breakdown({**profile(), 'busy': None})


def test_profiles_of_a_folder(tmp_path):
    """Red when batches are sorted as words, or another file is taken for a profile."""
    for batch in (128, 8, 64):
        (tmp_path / f'focus-{batch}.json').write_text(json.dumps(profile(batch)))
    (tmp_path / 'throughput.json').write_text('{}')
    found = overhead.of_files(overhead.profiles(tmp_path))
    assert list(found) == ['focus-8', 'focus-64', 'focus-128']
    assert found['focus-64']['us_per_step']['settle'] == 256
    with pytest.raises(ValueError, match='no profile'):
        overhead.profiles(Path(__file__).parent)


def test_the_option_needs_a_profile():
    """Red when --overhead is accepted and then tells nothing."""
    with pytest.raises(SystemExit, match='--profile'):
        throughput.parse(['--overhead'])
    for more in (['--engines', 'stock'], ['--device', 'cpu']):
        with pytest.raises(SystemExit, match='--engines, and a GPU'):
            throughput.parse(['--overhead', '--profile', 'x', *more])
    assert throughput.parse(['--overhead', '--profile', 'x']).overhead
