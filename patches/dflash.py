"""Rows of DFlash; what they put in place is in `lmdeploy_focus/dflash/`, for an engine with `DFlashConfig` only."""
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_AGENT = 'lmdeploy.pytorch.engine.model_agent.agent'
_SPEC = 'lmdeploy.pytorch.spec_decode'
_AR_SPEC = 'lmdeploy.pytorch.strategies.ar_spec'


def _check_engine(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from lmdeploy_focus.dflash.config import DFlashConfig
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if isinstance(given.get('speculative_config'), DFlashConfig):
            from lmdeploy_focus.dflash.admission import admit_engine
            admit_engine(given['model_path'], given.get('backend'), given.get('backend_config'),
                         given['speculative_config'])
        original(self, *args, **kwargs)

    return __init__


def _build_config(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_specdecode_config(target_model: str, speculative_config: Any, engine_config: Any, cache_config: Any,
                                dist_config: Any, trust_remote_code: bool = False) -> Any:
        from lmdeploy_focus.dflash.config import DFlashConfig
        build = original
        if isinstance(speculative_config, DFlashConfig):
            from lmdeploy_focus.dflash.specdecode import build
        return build(target_model, speculative_config, engine_config, cache_config, dist_config,
                     trust_remote_code=trust_remote_code)

    return build_specdecode_config


def _build_agent(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_spec_agent(specdecode_config: Any, backend_config: Any, *args: Any, device: str = 'cuda',
                         **kwargs: Any) -> Any:
        from lmdeploy_focus.dflash.specdecode import DFlashSpecDecodeConfig
        build = original
        if isinstance(specdecode_config, DFlashSpecDecodeConfig):
            from lmdeploy_focus.dflash.agent import build_agent as build
        return build(specdecode_config, backend_config, *args, device=device, **kwargs)

    return build_spec_agent


def _build_target(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_patched_model(config: Any, device: Any = None, build_model_ctx: Any = None) -> Any:
        from lmdeploy_focus.dflash.targets import DFlashBuildContext, target_hf_config
        if build_model_ctx is not None and isinstance(build_model_ctx.spec_model_ctx, DFlashBuildContext):
            from dataclasses import replace
            config = replace(config, hf_config=target_hf_config(config.hf_config))
        return original(config, device=device, build_model_ctx=build_model_ctx)

    return build_patched_model


ROWS: tuple[Patch, ...] = (
    Patch(
        name='dflash engine',
        target='lmdeploy.serve.core.async_engine:AsyncEngine.__init__',
        why='a speculative config that the chosen backend lacks is passed over with a warning',
        how='checks target, drafter and options in the process of the caller, before anything is loaded',
        remove_when='LMDeploy lets a speculative config check itself',
        written_for={
            'lmdeploy.serve.core.async_engine:AsyncEngine.__init__':
                'sha256:02b7cdffc5250f59805b5c008c314199d89e32ed28a68a05b5011e8c23817e43',
            'lmdeploy.pipeline:Pipeline.__init__':
                'sha256:58d1180584278bfe494bb2ebc33818332cb5da657cb14f3a523f312aca2182d1',
        },
        make=_check_engine,
        group='engine',
    ),
    Patch(
        name='dflash config',
        target='lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_specdecode_config',
        why='LMDeploy knows one generation of drafters and CUDA only',
        how='our config of drafter and target',
        remove_when='LMDeploy reads both generations of drafters and has no device in its checks',
        written_for={
            'lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_specdecode_config':
                'sha256:87add9563a75e20b783f26e844828d8a48a49eeaae6aa9d280c5b6f8fea607d7',
            'lmdeploy.pytorch.config:SpecDecodeConfig':
                'sha256:26aa01bf0818a2863817f32b7e4ed1bdec9e8e40ef8a2abb4fff2078bec14243',
            'lmdeploy.messages:SpeculativeConfig':
                'sha256:d906ac95814f896d20772545ad5300c6c637eb2faf200170876fa970b9ffaaf0',
            f'{_SPEC}.dflash_utils:build_target_layer_ids':
                'sha256:02c08f34827fed522fd128a6949f9b68ee14dfe6659040bd4784162612e5f9aa',
        },
        make=_build_config,
        group='engine',
    ),
    Patch(
        name='dflash agent',
        target=f'{_AGENT}:build_spec_agent',
        why='the speculative agent is named in a function, and its acceptance ignores filters, seeds and histories',
        how='DFlashSpecModelAgent',
        remove_when='LMDeploy offers a registry of speculative agents',
        written_for={
            f'{_SPEC}:build_spec_agent':
                'sha256:98f1e4977dd5d383cde7660b8d1fecdccf1017396f2838360623ae739bbf84a7',
            f'{_SPEC}.base:BaseSpecModelAgent':
                'sha256:61ab1fb212f4fc8bdc22996e5fa842119842b438317afe973cec57a5da480e39',
            f'{_SPEC}.spec_agent:SpecModelAgent':
                'sha256:bff7ea08e25b22c731d5132b4ed8c159533f7b80d297545e03fd0900840f578c',
            f'{_SPEC}.spec_agent:_expand_sampling_inputs':
                'sha256:6bb623ecdcf8c9a84f679bd681e6b938f572ef4ff4f5de440c197437e6f41416',
            f'{_SPEC}.guided_spec_helper:GuidedSpecHelper':
                'sha256:544b5f46fdbad9c5bcf3f2635358e2a015bb0e8119620098342b1455ec793ec7',
            f'{_SPEC}.proposers.dflash:DFlash':
                'sha256:10e793b69b776239fea90bd81a9cbaf819e00825c9966c8efbc0908afd022101',
            f'{_SPEC}.proposers.base:BaseSpecProposer':
                'sha256:a8b4af07397600410f66141e5f7a697501d93a21dbfba8b73c763863f700f554',
            f'{_SPEC}.proposers.base:draft_model_forward':
                'sha256:e136a57b7d47667850ec5e299134ea8e216c5e652d07d1d9c083e966886d7a04',
            'lmdeploy.pytorch.models.qwen3_dflash:DFlashDraftModel':
                'sha256:483229054bde91b2d0f236a79d5a589273603654840a18a4a7a03e4dff527e83',
            'lmdeploy.pytorch.models.qwen3_dflash:DFlashQwen3Attention':
                'sha256:0b636a0923cb6a2ff0b39ff0ad56b7592f53c7a58c4b2b1ccb3c5312973728f1',
            'lmdeploy.pytorch.models.qwen3_dflash:DFlashQwen3DecoderLayer':
                'sha256:3563a9a9651c7421ddcb0b49c2201e750e08a16b73f8bf8fa8be496e33618122',
            'lmdeploy.pytorch.models.qwen3_dflash:_normalize_dflash_weight_name':
                'sha256:3bdfacda0f024e13b22531aa072fc059613a978da2da207272e3e6a59d37e99d',
            'lmdeploy.pytorch.models.qwen3_dflash:_resolve_dflash_layer_attention':
                'sha256:d7776e9e41dc664a6bf5bd9f135fdca408ecf11fd40e3a601e7b6fbe9a3dc304',
            f'{_AR_SPEC}:ARSpecStrategyFactory':
                'sha256:ec334cc35286cbccde6df43daac82a44445c216d0fbdc1ee710e30e5eb979ae0',
            f'{_AR_SPEC}.model_agent:ARSpecExtraInputs':
                'sha256:2d7dc9ba56dd67076562d520fd76fe52e516c66d73487ec2738f97d0360b7e63',
            f'{_AR_SPEC}.model_agent:ARSpecStoppingCriteria':
                'sha256:5d26ed1c18aa8b68dad3487054b453fa1a08ab2e444523fc1a1712cc0ee18581',
            f'{_AR_SPEC}.model_agent:ARSpecModelAgentStrategy':
                'sha256:72bd6c5baac768e0f89aab068f4fc22e209410383cb74a3bee4b3a70ef63de8e',
            f'{_AR_SPEC}.step_inputs:ARSpecStepInputs':
                'sha256:33da790b99b4ddc526441e4ac264b778579925c8f1a9d40824e0275059fa2256',
            f'{_AR_SPEC}.sequence:SchedulerSequenceARSpec':
                'sha256:049ca8ed1b2553d1315a53a97a31171760f4f5f37b2084ab8646a3e0c2bb62d5',
            'lmdeploy.pytorch.strategies.ar.step_inputs:step_sampling_delta':
                'sha256:8182e995adce2418d1166946d1c1ea4b527ede3af2c9cc681c58ef1509839a08',
            'lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor':
                'sha256:475adb66ca99b0d59b3bd19a13c243ea90e385156f31bffed89da7c6c81a5f2f',
            'lmdeploy.pytorch.engine.logits_process:SamplingInputs':
                'sha256:0fa6a9e45039c6102ee92955836776d6d45588f2785509fb3942e69c1df83b70',
        },
        make=_build_agent,
        group='engine',
    ),
    Patch(
        name='dflash target',
        target=f'{_AGENT}:build_patched_model',
        why='only the Qwen3 and Qwen3.5 classes hand out hidden states, and a class is looked up by architecture alone',
        how='with DFlash, builds from a copy of the HF config that names the class which hands them out',
        remove_when='LMDeploy hands out the hidden states of any model',
        written_for={
            'lmdeploy.pytorch.models.patch:build_patched_model':
                'sha256:de3198e9f52a8f9d9719fd9b679809c670690064b242e0ad6b1c71ac2a233581',
            f'{_AGENT}:BaseModelAgent._build_model':
                'sha256:a241f9634b75121a052be30dc54179d27cfb7ebbafb97b9d4853593be91d9bf1',
            'lmdeploy.pytorch.models.qwen3:Qwen3model':
                'sha256:a859188007461afedaad079222c3cc6a7231c644177fc677664946c9794b2d30',
            'lmdeploy.pytorch.models.qwen3_moe:Qwen3MoeModel':
                'sha256:174eaf252d38f16958949aa11e41ec02b2f747a574e76a5f659055a6d8fd8669',
            'lmdeploy.pytorch.models.qwen2:Qwen2Model':
                'sha256:953a8d44dcfd2f251d55589869c7ac518dfaf87400c93f21562f2ef82b04e1ea',
            'lmdeploy.pytorch.models.llama:LlamaModel':
                'sha256:bc271a0307a3c5f9cb3647b06813b687c37373c7dfe586541d0d779bb1dbfa51',
        },
        make=_build_target,
        group='engine',
    ),
)
