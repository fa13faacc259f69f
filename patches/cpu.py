"""Rows of `device_type='cpu'`; what they put in place is in `lmdeploy_focus/cpu/`.

Every chooser asks whose work it does, or takes the device that it is given, and calls the original for any other
engine. The stand-ins of torch.cuda are put in place only where there is no GPU, so no GPU program can meet them.
"""
from collections.abc import Callable
from typing import Any

from ._patch import Patch


def _backend(original: Callable[[], type]) -> Callable[[], type]:

    def _get_backend() -> type:
        from lmdeploy_focus.cpu.scope import on_cpu
        if not on_cpu():
            return original()
        from lmdeploy_focus.cpu.backend import CpuOpsBackend
        return CpuOpsBackend

    return _get_backend


def _cpu_memory(original: Callable[..., Any]) -> Callable[..., Any]:

    def allocate(*args: Any, device: Any, **kwargs: Any) -> Any:
        from lmdeploy_focus.cpu.scope import on_cpu
        # 'meta' is asked for to measure only.
        return original(*args, device='cpu' if device == 'cuda' and on_cpu() else device, **kwargs)

    return allocate


def _step_inputs(original: Callable[..., Any]) -> Callable[..., Any]:

    def _try_to_cuda(val: Any, non_blocking: bool = False) -> Any:
        from lmdeploy_focus.cpu.scope import on_cpu
        if not on_cpu():
            return original(val, non_blocking=non_blocking)
        from lmdeploy_focus.cpu.agent import to_cpu
        return to_cpu(val, non_blocking=non_blocking)

    return _try_to_cuda


def _rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    eager = original.__wrapped__

    def _rotary_embedding_fwd(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        forward = eager if position_ids.device.type == 'cpu' else original
        return forward(position_ids, *args, **kwargs)

    return _rotary_embedding_fwd


def _bf16(original: Callable[..., bool]) -> Callable[..., bool]:

    def is_bf16_supported(device_type: str = 'cuda') -> bool:
        return device_type == 'cpu' or original(device_type)

    return is_bf16_supported


def _checker(original: type) -> Callable[..., Any]:

    def build_checker(model_path: str, engine_config: Any, **kwargs: Any) -> Any:
        checker = original
        if engine_config.device_type == 'cpu':
            from lmdeploy_focus.cpu.checks import CpuEngineChecker
            checker = CpuEngineChecker
        return checker(model_path=model_path, engine_config=engine_config, **kwargs)

    return build_checker


def _stand_in(name: str) -> Callable[[Any], Any]:

    def make(original: Any) -> Any:
        import torch
        if torch.cuda.is_available():
            return original
        from lmdeploy_focus.cpu import stand_ins
        return getattr(stand_ins, name)

    return make


def _stand_in_row(name: str, why: str, needed_by: dict[str, str]) -> Patch:
    return Patch(name=f'cpu-torch.cuda.{name}',
                 target=f'torch.cuda:{name}',
                 why=why,
                 how='only where torch.cuda.is_available() is false: does nothing, as all work is done on return',
                 remove_when='LMDeploy takes streams and events from its device backend',
                 written_for=needed_by,
                 make=_stand_in(name),
                 group='cpu')


_AGENT = 'lmdeploy.pytorch.engine.model_agent.agent'
_CACHE_ENGINE = 'lmdeploy.pytorch.engine.cache_engine'

_CHOOSERS = (
    Patch(name='cpu-backend',
          target='lmdeploy.pytorch.backends.selector:_get_backend',
          why='the operator backends are a fixed list, and an unknown device is an error',
          how="CpuOpsBackend for a CPU engine's work",
          remove_when='LMDeploy has a registry of operator backends',
          written_for={
              'lmdeploy.pytorch.backends.selector:_get_backend':
                  'sha256:b34c4c2e1c5b7b1f9bbc1b31483d3b13bc3e9ae5445728d3a763a4b628141fc9',
          },
          make=_backend,
          group='cpu'),
    Patch(name='cpu-kv-memory',
          target=f'{_CACHE_ENGINE}.plan:BlockCachePlan.allocate',
          why="CacheEngine.allocate_gpu_cache asks for memory of the device 'cuda' by name",
          how="'cuda' becomes 'cpu' in a CPU engine's work",
          remove_when='the cache engine takes the device from its agent',
          written_for={
              f'{_CACHE_ENGINE}.plan:BlockCachePlan.allocate':
                  'sha256:ca82c7f15fe76b896e7267bf50434bde1cf5344e1ed80bc5681dd37a730485f5',
              'lmdeploy.pytorch.engine.executor.base:ExecutorBase._update_num_gpu_blocks':
                  'sha256:530062688135691989ca008948c707fbaee6b5b81e149f4e5130b50325827c1c',
              f'{_AGENT}:BaseModelAgent.build_cache_plans':
                  'sha256:063f1a95456af068f3e6436c511b446c70b6928ff35775f196b14d94a44d8916',
              f'{_CACHE_ENGINE}.engine:CacheEngine.allocate_gpu_cache':
                  'sha256:35bfc7c570ef597e617a43209dcf453931fd6f37b423ff63a6d405e065b508d0',
          },
          make=_cpu_memory,
          group='cpu'),
    Patch(name='cpu-state-memory',
          target=f'{_CACHE_ENGINE}.state:_allocate_state_caches',
          why="StateCacheEngine asks for memory of the device 'cuda' by name",
          how="'cuda' becomes 'cpu' in a CPU engine's work",
          remove_when='the state cache engine takes the device from its agent',
          written_for={
              f'{_CACHE_ENGINE}.state:_allocate_state_caches':
                  'sha256:4de203090689a556573e2bf45c0ddbc1cc49279b18d61a15ea682b58fe5c0599',
              f'{_CACHE_ENGINE}.state:StateCacheEngine.__init__':
                  'sha256:c9d9bfcecd74219a7706eff700eaa06ff91d4470c7811df8f0cf7129e4be7ea2',
          },
          make=_cpu_memory,
          group='cpu'),
    Patch(name='cpu-step-inputs',
          target=f'{_AGENT}:_try_to_cuda',
          why="the agent sends the inputs of a step to the device 'cuda' by name",
          how='a copy in the same memory',
          remove_when='the agent sends them to its own device',
          written_for={
              f'{_AGENT}:_try_to_cuda':
                  'sha256:a10a1831c2a52fb01460a5159e73311874e531fd4c027f82a53be83f212f8c06',
              f'{_AGENT}:BaseModelAgent.all_context':
                  'sha256:a9059eaddd740f0f121c763408a5146e1c59ab68c6a17793b011081c7e33fcb7',
              f'{_AGENT}:BaseModelAgent.wakeup':
                  'sha256:1aa97ae89cdf985a3c8ec9428a1b0105003b4ccf2e3fa57878831f984487601b',
              f'{_AGENT}:BaseModelAgent._async_loop_inputs_preprocess':
                  'sha256:6eb8bc4aedc4a19653e239c38e76f62770305c96e947c6e2d744d4198e716a1e',
          },
          make=_step_inputs,
          group='cpu'),
    Patch(name='cpu-rotary',
          target='lmdeploy.pytorch.backends.default.rotary_embedding:_rotary_embedding_fwd',
          why='it is compiled by torch.compile, which takes 15 seconds on a CPU and gains nothing there',
          how='the function before compilation, for positions in CPU memory',
          remove_when='LMDeploy compiles it on accelerators only',
          written_for={
              'lmdeploy.pytorch.backends.default.rotary_embedding:_rotary_embedding_fwd':
                  'sha256:997f62611a9dfef575af4090d80118fe5d1ae7e7946d417462f1616c5adc2222',
              'lmdeploy.pytorch.backends.default.rotary_embedding:safe_torch_compile':
                  'sha256:e35a802a0db70b871515dd592e28e50b6898d6cbc4ef8cf4fc8b8580c55b9543',
          },
          make=_rotary,
          group='cpu'),
    Patch(name='cpu-bf16',
          target='lmdeploy.pytorch.config:is_bf16_supported',
          why='an unknown device gets float16 for a bfloat16 checkpoint',
          how="true for device_type='cpu'",
          remove_when='LMDeploy knows that a CPU has bfloat16',
          written_for={
              'lmdeploy.utils:is_bf16_supported':
                  'sha256:a3ba97b0bd8a12326a136864e1550af56bca68c7af73e28b78c82238ad703bf1',
              'lmdeploy.pytorch.config:_update_torch_dtype':
                  'sha256:d66dfd57a86cc3260a991b4074a2b21b5da747b501980bfba62a8cdf8d0558fe',
          },
          make=_bf16,
          group='cpu'),
    Patch(name='cpu-bf16-check',
          target='lmdeploy.utils:is_bf16_supported',
          why='the environment check warns that an unknown device has no bfloat16',
          how="true for device_type='cpu'",
          remove_when='LMDeploy knows that a CPU has bfloat16',
          written_for={
              'lmdeploy.utils:is_bf16_supported':
                  'sha256:a3ba97b0bd8a12326a136864e1550af56bca68c7af73e28b78c82238ad703bf1',
              'lmdeploy.pytorch.check_env.model:ModelChecker.check_dtype':
                  'sha256:c5f0eb5e534a30ca4a948e10ba4b8e8deef615f5e1eaa667531b4f446d308b89',
          },
          make=_bf16,
          group='cpu'),
    Patch(name='cpu-checker',
          target='lmdeploy.pytorch.engine.engine:EngineChecker',
          why='the environment check asks any device but CUDA for the dlinfer library',
          how="CpuEngineChecker for device_type='cpu'; it refuses what a CPU engine does not have",
          remove_when='LMDeploy takes the check from its device backend',
          written_for={
              'lmdeploy.pytorch.engine.engine_checker:EngineChecker':
                  'sha256:ad6111bb755cbe6feadb38ec83b0a24c38e7d93cb27f1bac1b647b97ff9052ba',
              'lmdeploy.pytorch.check_env.torch:TorchChecker':
                  'sha256:2d5ae3a7e8e6db08a7409c4838f427f198f1b051fddaefe0af28f4f64865316c',
          },
          make=_checker,
          group='cpu'),
)

_STAND_INS = (
    _stand_in_row('Stream', 'the cache engine makes a stream whatever the device', {
        f'{_CACHE_ENGINE}.engine:CacheEngine.__init__':
            'sha256:9029e141abfce92218be07b6890c5c4a7af2d333c455194716a81aad0c01d37d',
    }),
    _stand_in_row('Event', 'the agent records an event after each step whatever the device', {
        f'{_AGENT}:BaseModelAgent._push_output':
            'sha256:64ebeafb4fffde5e7322b41a68d75b7990e04f5ec892e3c542eabf01dc03d5cc',
    }),
    _stand_in_row('stream', 'a forward runs in a stream whatever the device', {
        f'{_AGENT}:model_forward':
            'sha256:590e0f33e5951eecd11142f365fafb9571ad37a4808a54e7cb5da49ca915d272',
    }),
    _stand_in_row('current_stream', 'sampling waits for the current stream whatever the device', {
        'lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor._wait_stream_once':
            'sha256:6ee57ef2f8dcc7001ca9a853d955a74e853dd0a5a23e7d8969edef9f26bdb864',
    }),
    _stand_in_row('synchronize', 'sleep waits for the GPU whatever the device', {
        f'{_AGENT}:BaseModelAgent.sleep':
            'sha256:106360dcc706911b6df8aa67b26c56d9e81f4617f79a47885a24387594afc2e6',
    }),
)

ROWS: tuple[Patch, ...] = _CHOOSERS + _STAND_INS
