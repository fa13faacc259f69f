"""Rows at the engine's edges: which engine is built, which requests it takes, and what it tells of its work."""
from collections.abc import Callable
from typing import Any

from ._patch import Patch


def _choose_engine(original: Callable[..., Any]) -> Callable[..., Any]:

    def from_pretrained(cls: type, pretrained_model_name_or_path: str, engine_config: Any = None, *args: Any,
                        **kwargs: Any) -> Any:
        from lmdeploy_focus.config import FocusEngineConfig
        if isinstance(engine_config, FocusEngineConfig):
            from lmdeploy_focus.engine.engine import FocusEngine, admitted
            engine_config = admitted(pretrained_model_name_or_path, engine_config, *args, **kwargs)
            cls = FocusEngine if engine_config.focus else cls
        return original(cls, pretrained_model_name_or_path, engine_config, *args, **kwargs)

    return from_pretrained


def _check_request(original: Callable[..., Any]) -> Callable[..., Any]:

    def determine_gen_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        gen_config = original(self, *args, **kwargs)
        from lmdeploy_focus.config import FocusEngineConfig
        from lmdeploy_focus.dflash.config import DFlashConfig
        ours, dflash = (isinstance(self.backend_config, FocusEngineConfig),
                        isinstance(self.speculative_config, DFlashConfig))
        if ours or dflash:
            from lmdeploy_focus.request import with_knobs
            gen_config = with_knobs(gen_config, self.backend_config)
        if ours and self.backend_config.focus:
            from lmdeploy_focus.request import refuse_unsupported
            refuse_unsupported(gen_config)
        if dflash:
            from lmdeploy_focus.request import refuse_unsupported_with_dflash
            refuse_unsupported_with_dflash(gen_config)
        return gen_config

    return determine_gen_config


def _read_body(original: Callable[..., Any]) -> Callable[..., Any]:
    from fastapi import Request

    # FastAPI awaits it in the context that the endpoint then runs in; it would give a plain function a thread's own
    async def validate_json_request(raw_request: Request) -> None:
        original(raw_request)
        from lmdeploy_focus.request import read_knobs
        await read_knobs(raw_request)

    return validate_json_request


def _keep_knobs(original: Callable[..., Any]) -> Callable[..., Any]:

    def from_gen_config(cls: type, gen_config: Any) -> Any:
        param = original(cls, gen_config)
        from lmdeploy_focus.request import FocusGenerationConfig
        if isinstance(gen_config, FocusGenerationConfig):
            from lmdeploy_focus.engine.knobs import FocusSamplingParam
            return FocusSamplingParam.of(param, gen_config)
        return param

    return from_gen_config


def _count(original: Callable[..., Any]) -> Callable[..., Any]:

    def make_infer_outputs(self: Any, batched_outputs: Any, running: Any, model_inputs: Any, delta: Any) -> Any:
        from lmdeploy_focus import stats
        stats.observe(self.scheduler, batched_outputs, running, decoding=model_inputs is None)
        return original(self, batched_outputs, running=running, model_inputs=model_inputs, delta=delta)

    return make_infer_outputs


def _tell(original: Callable[..., Any]) -> Callable[..., Any]:

    def get_schedule_metrics(self: Any) -> Any:
        from lmdeploy_focus import stats
        return stats.with_counters(original(self), self.scheduler)

    return get_schedule_metrics


def _export(original: Callable[..., Any]) -> Callable[..., Any]:

    def create_lifespan_handler(backend_config: Any, async_engine: Any, context: Any) -> Any:
        from lmdeploy_focus import metrics
        if backend_config.enable_metrics and isinstance(backend_config, metrics.config_class()):
            metrics.watch(async_engine)
        return original(backend_config, async_engine, context)

    return create_lifespan_handler


def _scrape(original: Callable[..., Any]) -> Callable[..., Any]:

    def mount_metrics(app: Any, backend_config: Any) -> None:
        from lmdeploy_focus import metrics
        original(app, backend_config)
        if backend_config.enable_metrics and isinstance(backend_config, metrics.config_class()):
            route = app.routes[-1]
            route.app = metrics.fresh(route.app)

    return mount_metrics


def _start(original: Callable[..., Any]) -> Callable[..., Any]:

    def start_mp_proc(self: Any, model_path: str, engine_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        from lmdeploy_focus.config import FocusEngineConfig
        start = original
        if isinstance(engine_config, FocusEngineConfig):
            from lmdeploy_focus.engine.engine_process import start_engine_process
            start = start_engine_process
        return start(self, model_path, engine_config, *args, **kwargs)

    return start_mp_proc


def _body(endpoint: str, module: str, sources: dict[str, str]) -> Patch:
    return Patch(
        name=f'body of {endpoint}',
        target=f'{module}:validate_json_request',
        why="the endpoint's request model drops the fields that it does not know",
        how="notes the body's focus_alpha and confidence_threshold, which the row 'requests' looks up",
        remove_when='LMDeploy hands the fields of a body that it does not know on to the engine',
        written_for={'lmdeploy.serve.utils.server_utils:validate_json_request':
                     'sha256:d256d687fd151798ce88ee6a4cf59a21cbcd2bb20927b1cbf4f61df6a592818f', **sources},
        make=_read_body,
        group='engine',
    )


ROWS: tuple[Patch, ...] = (
    Patch(
        name='engine',
        target='lmdeploy.pytorch.engine.engine:Engine.from_pretrained',
        why='AsyncEngine and the engine process name the class',
        how='checks the model and the options before anything is loaded; FocusEngine with focus on',
        remove_when='LMDeploy offers a registry of engines',
        written_for={
            'lmdeploy.pytorch.engine.engine:Engine.from_pretrained':
                'sha256:f754a200099610cfc43928566d0d840b933ecb555f796dc42fdd71ffa12394ff',
            'lmdeploy.serve.core.async_engine:AsyncEngine._build_pytorch':
                'sha256:8385a773577e0ac82e2f44cf191a9a042bb1c0b49a1ca77d996324c860c9dee9',
            'lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._mp_proc':
                'sha256:753cbf9af5aa17fe1e4db640dee8bf71fb953d85f7da144f43713f9ef77419d8',
        },
        make=_choose_engine,
        group='engine',
    ),
    Patch(
        name='requests',
        target='lmdeploy.serve.core.async_engine:AsyncEngine._determine_gen_config',
        why='nothing asks the engine whether it can serve a request before it is queued',
        how='refuses what focus or DFlash cannot answer rightly, as an error of the request; adds what its body asks '
            'of focus',
        remove_when='LMDeploy lets an engine refuse a generation config',
        written_for={
            'lmdeploy.serve.core.async_engine:AsyncEngine._determine_gen_config':
                'sha256:9bd8479150cc2f677b87b4874fc71f8c0a20ed81bac5346e1bbc11e01094e080',
            'lmdeploy.serve.core.async_engine:AsyncEngine.preprocess':
                'sha256:d588f51ecea78152f13cd84cd155f45ae1d8fb5a328398cba8b9d30d089fc11c',
        },
        make=_check_request,
        group='engine',
    ),
    _body('chats', 'lmdeploy.serve.openai.chat_completions.serving', {
        'lmdeploy.serve.openai.chat_completions.serving:register':
            'sha256:5003b2e3b22686be2b7db2b27d35a0a5c3d9e0c05e0218c4acc460d114d487bc',
        'lmdeploy.serve.openai.chat_completions.fanout:_invoke_choices':
            'sha256:e91118c141559c53baf4cda7cedc48430d4e0ce77385b66a32cab08e79d5ad3b',
        'lmdeploy.serve.core.chat_runner:ChatRunner.prepare':
            'sha256:c831a9bb1b431915e7b75e788e9f817be1dd9fb55cae161fb35ce83ef47eb329',
    }),
    _body('completions', 'lmdeploy.serve.openai.endpoints.completions', {
        'lmdeploy.serve.openai.endpoints.completions:register':
            'sha256:11829ad35e734cafa48d2b741a9eb5906d164dec2ccca335ea819a1d70eb369d',
    }),
    Patch(
        name='parameters of a sequence',
        target='lmdeploy.pytorch.messages:SamplingParam.from_gen_config',
        why='a sequence keeps only what LMDeploy picks from its generation config',
        how='FocusSamplingParam where the generation config is a FocusGenerationConfig',
        remove_when='LMDeploy lets a generation config make the parameters',
        written_for={
            'lmdeploy.pytorch.messages:SamplingParam':
                'sha256:deecf4c5da6fc8ae5df8d82b942d5bf75f9cec72f15e869f4fe555224e7f11b2',
            'lmdeploy.messages:GenerationConfig':
                'sha256:9d409a119cacfbce78f70bb29eb0417a7a94f6956cdc6a131ed54e21e4698f6c',
            'lmdeploy.pytorch.engine.engine_instance:EngineInstance.async_stream_infer':
                'sha256:f5074484de05b9f0b09c721764e32c74612f6cc622a2d149cafff33cbda9d14a',
            'lmdeploy.pytorch.engine.engine:Engine._add_message':
                'sha256:144bcff87da700dcb513c8f5a369e2e922dc5e4215f6422700fa917094fd1ffe',
        },
        make=_keep_knobs,
        group='engine',
    ),
    Patch(
        name='counters',
        target='lmdeploy.pytorch.engine.engine_loop:EngineLoop._make_infer_outputs',
        why='LMDeploy counts tokens but neither steps nor rows; with focus off no class of ours is there to count',
        how='counts steps, tokens and rows of each decode step on the host before the outputs are handled',
        remove_when='LMDeploy exports step and row counters for block diffusion',
        written_for={
            'lmdeploy.pytorch.engine.engine_loop:EngineLoop._make_infer_outputs':
                'sha256:412c47c1e5d14ab18922cbfcde8f0337d2c8b602d63078ba65574cdb85e74147',
            'lmdeploy.pytorch.strategies.dllm.sequence:DLLMSequenceStrategy.update_running':
                'sha256:1e127087303bed4a0b7c3f441f2a147ea9cf9d7b35fdcb0866c20e1faf127194',
        },
        make=_count,
        group='engine',
    ),
    Patch(
        name='schedule metrics',
        target='lmdeploy.pytorch.engine.engine:Engine.get_schedule_metrics',
        why='the only figures of an engine process that reach the API server',
        how='adds our counters',
        remove_when='LMDeploy lets an engine add metrics',
        written_for={
            'lmdeploy.pytorch.engine.engine:Engine.get_schedule_metrics':
                'sha256:f9bb82dd6e489d89fd5a4ef7091f5873ea2fd2cc5d30a9a58e627910a2d8e738',
        },
        make=_tell,
        group='engine',
    ),
    Patch(
        name='metrics of the server',
        target='lmdeploy.serve.openai.api_server:create_lifespan_handler',
        why='the server makes its engine inside one function',
        how='registers our collector for the engine',
        remove_when='LMDeploy lets an engine add metrics',
        written_for={
            'lmdeploy.serve.openai.api_server:serve':
                'sha256:0974b493e2ea5c544a4e6245c5264c624c5937573d02fdc2fbc3acdeeb907511',
            'lmdeploy.serve.openai.api_server:create_lifespan_handler':
                'sha256:02c1c8b8c836aeccc616094a4c6c1504b35965149bd2536980edb5e5ebf4e2f1',
        },
        make=_export,
        group='engine',
    ),
    Patch(
        name='metrics route',
        target='lmdeploy.serve.openai.api_server:mount_metrics',
        why='LMDeploy refreshes the figures of its engine process every ten seconds only',
        how='asks the engine for our counters before a scrape is answered',
        remove_when='LMDeploy refreshes its own on a scrape',
        written_for={
            'lmdeploy.serve.openai.api_server:mount_metrics':
                'sha256:af620534ed00b5d85c708011a75ddeb6bd752ad840fee4e7c0737db98988c42f',
        },
        make=_scrape,
        group='engine',
    ),
    Patch(
        name='start of the engine process',
        target='lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._start_mp_proc',
        why='on a busy machine the new process often dies: the manager that hands over its port is gone too soon',
        how='the port comes through a pipe',
        remove_when='LMDeploy keeps the manager until the new process has let go of it',
        written_for={
            'lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._start_mp_proc':
                'sha256:e1154bdb3b6aad227db665bed520648525908ea5d6b0c8c9a544d7c311f57738',
            'lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._mp_proc':
                'sha256:753cbf9af5aa17fe1e4db640dee8bf71fb953d85f7da144f43713f9ef77419d8',
        },
        make=_start,
        group='engine',
    ),
)
