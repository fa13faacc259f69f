"""Rows of DFlash; what they put in place is in `lmdeploy_focus/dflash/`, for an engine with `DFlashConfig` only."""
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_AGENT = 'lmdeploy.pytorch.engine.model_agent.agent'
_SPEC = 'lmdeploy.pytorch.spec_decode'
_AR_SPEC = 'lmdeploy.pytorch.strategies.ar_spec'
_LOOP = 'lmdeploy.pytorch.engine.engine_loop'
_ASYNC = 'lmdeploy.serve.core.async_engine'
_OPENAI = 'lmdeploy.serve.openai'


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


def _build_loop(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_engine_loop(engine: Any) -> Any:
        from lmdeploy_focus.dflash.specdecode import DFlashSpecDecodeConfig
        loop = original(engine)
        if isinstance(engine.specdecode_config, DFlashSpecDecodeConfig):
            from lmdeploy_focus.dflash.engine_loop import DFlashEngineLoop
            return DFlashEngineLoop.of(loop)
        return loop

    return build_engine_loop


def _observe_run(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def safe_run(self: Any, handle: Any, session: Any, **kwargs: Any) -> Any:
        from lmdeploy_focus.dflash.config import DFlashConfig
        run = original(self, handle, session=session, **kwargs)
        if isinstance(self.speculative_config, DFlashConfig):
            from lmdeploy_focus.dflash.responses import observed
            return observed(run, session, self.num_spec_token)
        return run

    return safe_run


def _add_acceptance(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def generate(self: Any, request: Any, stream_response: bool = True) -> Any:
        from lmdeploy_focus.dflash.config import DFlashConfig
        stream = original(self, request, stream_response=stream_response)
        if isinstance(self.speculative_config, DFlashConfig):
            from lmdeploy_focus.dflash.responses import with_acceptance
            return with_acceptance(stream, request, self.num_spec_token)
        return stream

    return generate


def _count_steps(original: Callable[..., Any]) -> Callable[..., Any]:

    def update_from_output(self: Any, outputs: Any) -> None:
        from lmdeploy_focus.dflash.acceptance import Acceptance
        spec_info = getattr(outputs.req_metrics, 'spec_info', None)
        if isinstance(spec_info, Acceptance):
            from lmdeploy_focus.dflash.metrics import add
            add(self, spec_info)
        else:
            original(self, outputs)

    return update_from_output


def _complete_usage(original: Callable[..., Any]) -> Callable[..., Any]:

    def register(router: Any, server_context: Any) -> None:
        from lmdeploy_focus.dflash.config import DFlashConfig
        if isinstance(getattr(server_context.async_engine, 'speculative_config', None), DFlashConfig):
            from lmdeploy_focus.dflash.usage import UsageRouter
            router = UsageRouter(router)
        original(router, server_context)

    return register


def _report(original: Callable[..., Any]) -> Callable[..., Any]:

    def build_pipe(*args: Any, **kwargs: Any) -> Any:
        from lmdeploy_focus.dflash.config import DFlashConfig
        pipe = original(*args, **kwargs)
        if isinstance(pipe.async_engine.speculative_config, DFlashConfig):
            from lmdeploy_focus.dflash.chat import reporting
            return reporting(pipe)
        return pipe

    return build_pipe


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
    Patch(
        name='dflash acceptance',
        target=f'{_LOOP}:build_engine_loop',
        why='its counts have tokens after a stop and lack the steps between two outputs; a function names the class',
        how='DFlashEngineLoop',
        remove_when='LMDeploy counts the accepted tokens of a whole request, up to the end of its answer',
        written_for={
            f'{_LOOP}:build_engine_loop':
                'sha256:4d4a8476711e31c45d1635b2fc8595ceb4d9abad1576b4636b665fa2d68654c5',
            f'{_LOOP}:EngineLoop':
                'sha256:477914f65b4a65bb477ff8d9c54d038cebe20cc08345b07b263da645f0108592',
            'lmdeploy.pytorch.engine.request:Response':
                'sha256:9b5e81e4c280e2bcf4fdc04f3bd5123fd64cc66f3444fbc9484f9cb6699ceeab',
            'lmdeploy.messages:RequestMetrics':
                'sha256:acc96310b38bd4a2fe950f7b2176be7e403e3c0e401370214a3ad4b77705b3b3',
            'lmdeploy.pytorch.engine.engine:Engine._on_stop_session':
                'sha256:79a4fca2d6016b717cd8b846b7d4023dbfe823b61efbd3e948904a5304ea2023',
            'lmdeploy.pytorch.engine.mp_engine.base_worker:EngineOutputGather':
                'sha256:fa70dd850840bd5e3adf9d33d6361b70400770673138477af1254e81ba64ec30',
        },
        make=_build_loop,
        group='engine',
    ),
    Patch(
        name='dflash outputs',
        target=f'{_ASYNC}:AsyncEngine.safe_run',
        why='only here are the outputs of the engine seen that the responses of a request are made from',
        how='hands on each output with the steps since the last one, and tells the session the sum',
        remove_when='LMDeploy hands the acceptance of a request on to its responses',
        written_for={
            f'{_ASYNC}:AsyncEngine.safe_run':
                'sha256:12b16bf8377d2000783ca5e8549968982dd47185da9fcef45fc967f9dff0fa0b',
            f'{_ASYNC}:AsyncEngine.generate':
                'sha256:3b37d7709dd7e9c8ee52814c6cd50554150c280530f8049783f8957b7e8321e4',
            'lmdeploy.messages:EngineOutput':
                'sha256:fd117a90d96d023a303d12277132a9a3d2d580a15c87a51d919292bfd5565faf',
        },
        make=_observe_run,
        group='engine',
    ),
    Patch(
        name='dflash responses',
        target=f'{_ASYNC}:AsyncEngine.generate',
        why="LMDeploy's responses have no field for it",
        how='the acceptance of the request so far in each response',
        remove_when='LMDeploy hands the acceptance of a request on to its responses',
        written_for={
            f'{_ASYNC}:AsyncEngine.generate':
                'sha256:3b37d7709dd7e9c8ee52814c6cd50554150c280530f8049783f8957b7e8321e4',
            f'{_ASYNC}:GenOut':
                'sha256:a452b92518fa9c3cabf3be06efea372da635505fd713cb2378bf246ae3ae8a0e',
            'lmdeploy.messages:Response':
                'sha256:410e4570b9c71637bf1ea349d8eca0c722d8f4957b37e03a2dc5318a13184e62',
            'lmdeploy.pipeline:Pipeline._infer':
                'sha256:7ba9de2487ab37e438e32a97970c6542a2315c3e398772d515a31dd7a53d7a1b',
        },
        make=_add_acceptance,
        group='engine',
    ),
    Patch(
        name='dflash metrics',
        target='lmdeploy.metrics.stats:SpeculativeDecodingStats.update_from_output',
        why='an output is taken for one step',
        how='adds all steps of our outputs',
        remove_when='LMDeploy counts the steps between two outputs',
        written_for={
            'lmdeploy.metrics.stats:SpeculativeDecodingStats':
                'sha256:38ad9a661c40aae1cd353a71b5a3799046e8fb475eb5e842eaffeaf0a2cb4b6a',
            'lmdeploy.metrics.loggers:PrometheusStatLogger.record_specdecode':
                'sha256:3d42fc4f5a537d975faf22e655482ea05ecd402c736c0bb5f0683f9d6b37a693',
        },
        make=_count_steps,
        group='engine',
    ),
    Patch(
        name='dflash usage of chats',
        target=f'{_OPENAI}.chat_completions:register',
        why='LMDeploy leaves these fields of the usage empty; an endpoint is a function inside this one',
        how='completes the usage in the answers of the endpoint',
        remove_when='LMDeploy fills accepted_prediction_tokens and rejected_prediction_tokens',
        written_for={
            f'{_OPENAI}.chat_completions.serving:register':
                'sha256:5003b2e3b22686be2b7db2b27d35a0a5c3d9e0c05e0218c4acc460d114d487bc',
            f'{_OPENAI}.chat_completions.fanout:fanout_chat_completions':
                'sha256:00a6d3ad8d0086ddec49958adf23a32024aee30fc2e16ebdb9a36905dca7b5b2',
            f'{_OPENAI}.chat_completions.fanout:_collate_responses':
                'sha256:bf0fe915160d1f469ddafe3fd8c59484d9fc8d4023a019de5f8c30016ff6573c',
            f'{_OPENAI}.chat_completions.fanout:_collate_streams':
                'sha256:17ec07cb1b9ba4c97f14d39e62ecd1e0b397dc2775faf0d89336470f82f33428',
            f'{_OPENAI}.endpoints.router:create_openai_router':
                'sha256:4dee79f2d847c810746beffbc670106b0f900516ae796788ab902f24e52bd40e',
            f'{_OPENAI}.protocol:CompletionTokensDetails':
                'sha256:1a64d19ec206d53e9afc6575ffa95cae065315f9571f1a095c501d89fa0ccbe5',
            f'{_OPENAI}.protocol:UsageInfo':
                'sha256:940d411543133732470af66d1a566a984c31faa0c14e9dbbf81f1a706003551a',
        },
        make=_complete_usage,
        group='engine',
    ),
    Patch(
        name='dflash usage of completions',
        target=f'{_OPENAI}.endpoints.completions:register',
        why='LMDeploy leaves these fields of the usage empty; an endpoint is a function inside this one',
        how='completes the usage in the answers of the endpoint',
        remove_when='LMDeploy fills accepted_prediction_tokens and rejected_prediction_tokens',
        written_for={
            f'{_OPENAI}.endpoints.completions:register':
                'sha256:11829ad35e734cafa48d2b741a9eb5906d164dec2ccca335ea819a1d70eb369d',
            f'{_OPENAI}.endpoints.router:create_openai_router':
                'sha256:4dee79f2d847c810746beffbc670106b0f900516ae796788ab902f24e52bd40e',
            f'{_OPENAI}.protocol:CompletionTokensDetails':
                'sha256:1a64d19ec206d53e9afc6575ffa95cae065315f9571f1a095c501d89fa0ccbe5',
            f'{_OPENAI}.protocol:UsageInfo':
                'sha256:940d411543133732470af66d1a566a984c31faa0c14e9dbbf81f1a706003551a',
        },
        make=_complete_usage,
        group='engine',
    ),
    Patch(
        name='dflash chat',
        target='lmdeploy.cli.chat:build_pipe',
        why='the command prints what it gets from its pipeline, and nothing else',
        how='a pipeline that prints a line on the drafted tokens after each answer',
        remove_when="LMDeploy's chat prints the acceptance length",
        written_for={
            'lmdeploy.cli.chat:build_pipe':
                'sha256:aeebbbb539c6a5af11fe421a12713469725319e7a5a65dccec89758a5006cb5e',
            'lmdeploy.cli.chat:main':
                'sha256:17b786cbfb40cc938037e5bed841de1d271e3946d84bff8ec3c7030744229de3',
            'lmdeploy.pipeline:Pipeline.stream_infer':
                'sha256:1e0dfb4319b1d6d04029c837a24d7f26500a2d77ef2c9c1d3514ad634a618e4c',
        },
        make=_report,
        group='boundary',
    ),
)
