"""The operators of a CPU engine: LMDeploy's plain torch ones, and those that it has on accelerators only."""
from typing import Any, cast

from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.base import BuildSpec, ImplT
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec

from .attention import CpuAttentionImpl, CpuAttentionMetadata
from .experts import CpuFusedMoEImpl
from .sampling import CpuMultinomialSamplingImpl


class CpuOpsBackend(DefaultOpsBackend):
    """LMDeploy's operator backend for `device_type='cpu'`.

    The graph runner is the base class's, which runs the model eagerly.
    """

    @staticmethod
    def get_name() -> str:
        """Name of the backend in LMDeploy's messages."""
        return 'cpu'

    @classmethod
    def build_op(cls, spec: BuildSpec[ImplT], *, enable_deterministic: bool = False) -> ImplT:
        """Build one operator.

        Raises:
            ValueError: The model needs an attention or experts that there is no CPU code for.
            RuntimeError: From LMDeploy, for an operator that has no plain torch code.
        """
        if isinstance(spec, PagedAttentionBuildSpec):
            return cast(ImplT, CpuAttentionImpl(spec))
        if isinstance(spec, FusedMoEBuildSpec):
            return cast(ImplT, CpuFusedMoEImpl(spec))
        if isinstance(spec, MultinomialSamplingBuildSpec):
            return cast(ImplT, CpuMultinomialSamplingImpl())
        return super().build_op(spec, enable_deterministic=enable_deterministic)

    @staticmethod
    def get_attention_metadata_cls() -> type[CpuAttentionMetadata]:
        """Class of what the attention layers of one step share."""
        return CpuAttentionMetadata

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Attach the attention metadata to a `StepContext`."""
        step_context.attn_metadata = CpuAttentionMetadata.from_step_context(step_context)
        return step_context

    @staticmethod
    def ccl_backend() -> str:
        """Library for collectives between processes."""
        return 'gloo'
