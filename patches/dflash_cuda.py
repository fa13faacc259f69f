"""Rows of DFlash on a GPU; they act on models that are built for an engine with `DFlashConfig` only."""
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_CUDA = 'lmdeploy.pytorch.backends.cuda'


def _build_attention(original: Callable[..., Any]) -> Callable[..., Any]:

    def _build_paged_attention(spec: Any) -> Any:
        from lmdeploy.pytorch.models.patch import get_build_model_context

        from lmdeploy_focus.dflash.targets import DFlashBuildContext
        if isinstance(get_build_model_context().spec_model_ctx, DFlashBuildContext):
            from lmdeploy_focus.dflash.attention import build_attention
            return build_attention(spec, original)
        return original(spec)

    return _build_paged_attention


def _build_runner(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_graph_runner(model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any) -> Any:
        from lmdeploy_focus.dflash.targets import DFlashBuildContext
        build = original
        if isinstance(model.ctx_mgr.build_ctx.spec_model_ctx, DFlashBuildContext):
            from lmdeploy_focus.dflash.graph_runner import build_graph_runner as build
        return build(model, model_config=model_config, cache_config=cache_config, backend_config=backend_config,
                     device=device)

    return build_graph_runner


ROWS: tuple[Patch, ...] = (
    Patch(
        name='dflash attention',
        target=f'{_CUDA}.attention:_build_paged_attention',
        why='without FlashAttention-3 no operator takes several rows a sequence in a decode step',
        how='with DFlash, builds DecodeRowsAttentionImpl',
        remove_when="LMDeploy's Triton operator takes several rows, causal or not, with a window",
        written_for={
            f'{_CUDA}.attention:_build_paged_attention':
                'sha256:84bcc5fe7c00d6c08d63308d78ef9d47ab00d48cd1a4af1c2607f766f065bb44',
            f'{_CUDA}.attention.default:TritonAttentionImpl':
                'sha256:6c9d813c051594e43553c9c823cbaf792cbd8c79e8002ab51a0ca04e6d7c9c2b',
            f'{_CUDA}.attention.default:TritonAttentionMetaBuilder':
                'sha256:5f55c9c59db8d6faca4a1008bf2307d190c524f90b8765d353ecebbf117f8a3b',
            f'{_CUDA}.op_backend:CudaOpsBackend.update_step_context':
                'sha256:56b1b50cedfd4f2b08108ff684ac4ebeeb7c2267061ae4144aa6c71ea637f8cf',
        },
        make=_build_attention,
        group='engine',
    ),
    Patch(
        name='dflash graphs',
        target=f'{_CUDA}.op_backend:CudaOpsBackend.build_graph_runner',
        why='the runner of CUDA graphs is named in a function, and refuses speculative decoding without '
            'FlashAttention-3',
        how='with DFlash, builds DFlashGraphRunner',
        remove_when='the runner asks the operators that a model was built with',
        written_for={
            f'{_CUDA}.op_backend:CudaOpsBackend.build_graph_runner':
                'sha256:f640a3a2d3c0fb5dadc65d437dfb917aedf82ab94b528e1f0ad57fdf6198f459',
            f'{_CUDA}.graph_runner.runner:CUDAGraphRunner':
                'sha256:78be5efedca188fa01d5143d98cca039c391d28d9813110a58bedd7fdd48883a',
            f'{_CUDA}.graph_runner.runner:_validate_speculative_decoding':
                'sha256:02a24e6a9d308d45564f7547b621417507431586e87d80119b3a4ac564f7afb6',
        },
        make=_build_runner,
        group='engine',
    ),
)
