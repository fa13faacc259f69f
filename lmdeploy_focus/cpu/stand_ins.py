"""Streams and events of a process that has no GPU.

LMDeploy's model agent and cache engine make CUDA streams and events whatever the device. Work on a CPU is finished
when the call returns, so a stream orders nothing and an event has always happened. `patches/cpu.py` puts these in
torch.cuda only where `torch.cuda.is_available()` is false.
"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Event:
    """Stands for `torch.cuda.Event`: it has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: 'Stream | None' = None) -> None:
        """Nothing is pending, so there is nothing to record."""

    def wait(self, stream: 'Stream | None' = None) -> None:
        """The work before the event is done."""

    def synchronize(self) -> None:
        """The work before the event is done."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True


class Stream:
    """Stands for `torch.cuda.Stream`: a queue that is always empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_event(self, event: Event) -> None:
        """The event has happened."""

    def wait_stream(self, stream: 'Stream') -> None:
        """The other queue is empty."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return `event`, or a new one; it has happened either way."""
        return event if event is not None else Event()

    def synchronize(self) -> None:
        """The queue is empty."""

    def query(self) -> bool:
        """Whether the queue is empty: always."""
        return True


_current_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    """Stands for `torch.cuda.current_stream`."""
    del device
    return _current_stream


def stream(stream: Any) -> AbstractContextManager[None]:
    """Stands for `torch.cuda.stream`: there is one queue, so none is selected."""
    del stream
    return nullcontext()


def synchronize(device: Any = None) -> None:
    """Stands for `torch.cuda.synchronize`: nothing is pending."""
    del device
