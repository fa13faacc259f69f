"""Starting the engine's own process, as the API server does.

LMDeploy tells the parent the port of the new process through a manager, a third process, and shuts that down as soon
as the port is known. On a busy machine the new process often finds the manager gone in the middle of its last call
and dies. Here the port comes through a pipe.
"""
from multiprocessing.connection import Connection
from typing import Any


class PortPipe:
    """Takes the place of both the shared dictionary and its condition in the new process."""

    def __init__(self, sender: Connection) -> None:
        self._sender = sender

    def __enter__(self) -> 'PortPipe':
        return self

    def __exit__(self, *exc_info: object) -> None:
        """A pipe needs no lock."""

    def __setitem__(self, key: str, value: int) -> None:
        self._sender.send((key, value))

    def notify(self) -> None:
        """The receiver wakes by itself."""


def start_engine_process(engine: Any, model_path: str, engine_config: Any, speculative_config: Any = None,
                         **kwargs: Any) -> None:
    """Spawn the engine process of a `ZMQMPEngine` and wait for its port.

    Sets the engine's `mp_ctx`, `proc` and `port`.

    Raises:
        RuntimeError: The process ended before it named its port.
    """
    import torch.multiprocessing as mp
    from lmdeploy.utils import get_logger
    engine.mp_ctx = mp.get_context('spawn')
    receiver, sender = engine.mp_ctx.Pipe(duplex=False)
    port_pipe = PortPipe(sender)
    engine.proc = engine.mp_ctx.Process(target=engine._mp_proc,
                                        name='mp_engine_proc',
                                        args=(port_pipe, port_pipe),
                                        kwargs={
                                            'model_path': model_path,
                                            'engine_config': engine_config,
                                            'log_level': get_logger('lmdeploy').level,
                                            'speculative_config': speculative_config,
                                            **kwargs
                                        })
    engine.proc.start()
    sender.close()
    with receiver:
        try:
            _, engine.port = receiver.recv()
        except EOFError:
            engine.proc.join()
            raise RuntimeError('the engine process ended before it was ready, with exit code '
                               f'{engine.proc.exitcode}') from None
