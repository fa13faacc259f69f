"""Rows that tell how many drafted tokens were accepted; they act on engines with `DFlashConfig` only."""
import functools
from collections.abc import Callable
from typing import Any

from ._patch import Patch

_LOOP = 'lmdeploy.pytorch.engine.engine_loop'
_ASYNC = 'lmdeploy.serve.core.async_engine'
_OPENAI = 'lmdeploy.serve.openai'


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
