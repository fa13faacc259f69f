"""Which work belongs to a CPU engine.

LMDeploy keeps the current device in a process-wide variable that an engine's loop holds for its whole life, so the
first engine to close would take the device away from the others. A context variable belongs to one thread or task:
engines of either kind run side by side and close in any order.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_in_cpu_engine: ContextVar[bool] = ContextVar('lmdeploy_focus_in_cpu_engine', default=False)


@contextmanager
def cpu_scope() -> Iterator[None]:
    """Mark the work inside as a CPU engine's."""
    token = _in_cpu_engine.set(True)
    try:
        yield
    finally:
        _in_cpu_engine.reset(token)


def on_cpu() -> bool:
    """Whether the running thread or task works for a CPU engine, or LMDeploy's own device context says so."""
    if _in_cpu_engine.get():
        return True
    from lmdeploy.pytorch.devices import get_device_manager
    return get_device_manager().current_context().device_type == 'cpu'
