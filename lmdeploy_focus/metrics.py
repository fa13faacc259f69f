"""The counters as Prometheus series of the API server: `lmdeploy_focus:NAME_total`."""
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .stats import COUNTERS, FocusScheduleMetrics

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def config_class() -> type:
    """The config whose servers export our series."""
    from .config import FocusEngineConfig
    return FocusEngineConfig


class FocusCollector:
    """Prometheus collector of one server's engine."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.counters: dict[str, int] = {}

    async def refresh(self) -> None:
        """Ask the engine."""
        if self.engine is not None:
            metrics = await self.engine.get_schedule_metrics()
            if isinstance(metrics, FocusScheduleMetrics):
                self.counters = metrics.counters

    def collect(self) -> Iterator[Any]:
        """The series as of the last refresh."""
        from prometheus_client.core import CounterMetricFamily
        for name, value in self.counters.items():
            yield CounterMetricFamily(f'lmdeploy_focus:{name}', COUNTERS[name], value=value)


_collector = FocusCollector()


def watch(async_engine: Any) -> None:
    """Export the counters of the engine behind `async_engine` from now on; a process serves one engine."""
    from prometheus_client import REGISTRY
    if _collector.engine is None:
        REGISTRY.register(_collector)
    _collector.engine = async_engine


def fresh(app: AsgiApp) -> AsgiApp:
    """`app`, with our counters asked for before it answers."""

    async def refreshed(scope: Any, receive: Any, send: Any) -> None:
        await _collector.refresh()
        await app(scope, receive, send)

    return refreshed
