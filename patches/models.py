"""Chooses the model class for each config."""
import functools
from typing import Any

from ._patch import Patch


def _build_model(original: Any) -> Any:

    @functools.wraps(original)
    def build_model_from_hf_config(model_config: Any, dtype: Any = None, device: Any = None, ctx_mgr: Any = None,
                                   build_model_ctx: Any = None) -> Any:
        from ..config import FocusDLLMConfig
        dllm_config = None if build_model_ctx is None else build_model_ctx.dllm_config
        if isinstance(dllm_config, FocusDLLMConfig) and dllm_config.focus is not None:
            from ..models.configs import focus_hf_config
            model_config = focus_hf_config(model_config)
        return original(model_config, dtype=dtype, device=device, ctx_mgr=ctx_mgr, build_model_ctx=build_model_ctx)

    return build_model_from_hf_config


ROWS = (
    Patch(
        name='model-class',
        target='lmdeploy.pytorch.models.patch:build_model_from_hf_config',
        why='LMDeploy looks a model class up by the architecture alone, so a registered class would serve stock too',
        how='with focus on, builds from a copy of the HF config that names our architecture',
        remove_when='the class lookup gets the build context',
        written_for={
            'lmdeploy.pytorch.models.patch:build_model_from_hf_config':
                'sha256:411c3780e684f185bf59da4fc20089ee299b6c1e447546fce06fbe9216050631',
            'lmdeploy.pytorch.models.patch:_get_model_class':
                'sha256:0b68832f71685cb8389846134ad21ef94b09a7f5ede651cfa8a3a348d9478bda',
            'lmdeploy.pytorch.models.patch:_get_module_map':
                'sha256:86401d92cdddcce1588f38c2bb4e30a67066944ae10eb39a05d027c9a180f619',
            'lmdeploy.pytorch.models.sdar:SDARForCausalLM':
                'sha256:ef9586337313a43993912a5f644f9c17f03a90804c2b57cd6ecbf117c8c316c3',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeAttention':
                'sha256:73ac93bcdbd84c52e923eba314d59e5a6ad79ed0d82ad9cd0bf0c3a92722db4b',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeMLP':
                'sha256:31d79a106c5d2fe9a64d3da1bf779887894782a98cf2ba54e223cd47f39bae22',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeSparseMoeBlock':
                'sha256:75be2f40fb621a78df2fc615e15872b75ae8d94f4c8e253ad56b49322aefd356',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeDecoderLayer':
                'sha256:a6a5639d4069dfd1af4529728b05aacd27e2cb22e61c779945af0d0b6617dce3',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeModel':
                'sha256:f406f75006617e2c62789efba21617ae40e471d7279121cdf9849f6d82711b39',
            'lmdeploy.pytorch.models.sdar_moe:SDARMoeForCausalLM':
                'sha256:5bbafa4ab91196a0236bf6c363e5f3b7e081056da2d54f4d9e3e921d501ff919',
            'lmdeploy.pytorch.nn.moe.route:RouterGemm':
                'sha256:455d2c814b1dd3f124706c324d78c981e506aff320ca0dd41b1ea7f84889aeeb',
            'lmdeploy.pytorch.nn.moe.route:NoauxTCRouter':
                'sha256:eb8d48e71c331696947a9288567567d3c28a6eec1dcdf310e503f3d662acc8e1',
            'lmdeploy.pytorch.backends.default.moe_router:DefaultRouterNoauxTCImpl':
                'sha256:05edec3c899f032b93f827c037700352647f8ed553175f13f29b6f2bcc839aa3',
            'lmdeploy.pytorch.configurations.builder:AutoModelConfigBuilder':
                'sha256:febc8603b4b3f19141f1a1a5cd46fc404c2ea2d10bacbc1cd9209c001db754ea',
            'lmdeploy.pytorch.configurations.sdar:SDARModelConfigBuilder':
                'sha256:f421e9c2c5ab9a84d2b77e9dbac40a6a2341429c7464fa94f59479611cdf2119',
            'lmdeploy.pytorch.configurations.default:DefaultModelConfigBuilder':
                'sha256:477436e0bf523a7c8029f950dab32946ea1c83bd0b148465a54d367745e61c6d',
            'lmdeploy.pytorch.nn.linear.utils:QKVMixin':
                'sha256:fd690e0ec1e3c3cbf980b4d94fa2332c57f15b038fa92cefd33fcc0f31b64adc',
            'lmdeploy.pytorch.nn.linear.blocked_fp8:QKVBlockedF8Linear':
                'sha256:1992766945511f8d6ee665b69dc6b9ef075906abda4ae69647cd8369258034da',
            'lmdeploy.pytorch.nn.moe.blocked_fp8:LinearWeightsBlockedF8':
                'sha256:9b505197d4a3ddec95a38e56c553056ee185e04fbc2449150a8501432657b132',
            'lmdeploy.pytorch.config:_patch_quantization_config':
                'sha256:663724badf19dd65a7bb105acb924e0c3af5e99d448cc277459d77f3781e4e49',
            'lmdeploy.pytorch.check_env.model:ModelChecker.check_dtype':
                'sha256:c5f0eb5e534a30ca4a948e10ba4b8e8deef615f5e1eaa667531b4f446d308b89',
        },
        make=_build_model,
        group='engine',
    ),
)
