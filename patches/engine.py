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
        if isinstance(self.backend_config, FocusEngineConfig) and self.backend_config.focus:
            from lmdeploy_focus.request import refuse_unsupported
            refuse_unsupported(gen_config)
        from lmdeploy_focus.dflash.config import DFlashConfig
        if isinstance(self.speculative_config, DFlashConfig):
            from lmdeploy_focus.request import refuse_unsupported_with_dflash
            refuse_unsupported_with_dflash(gen_config)
        return gen_config

    return determine_gen_config


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
        how='refuses what focus or DFlash cannot answer rightly, as an error of the request',
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
