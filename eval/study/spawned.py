"""A process of its own for each engine of a study: two of them would share the GPU and their patches."""
import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any


def results(work: Callable[..., None], job: Any, name: str) -> Iterator[dict[str, Any]]:
    """What `work(job, pipe)` sends from its process, each printed when it comes.

    Raises:
        SystemExit: the process failed; the message has the name of its engine.
    """
    context = multiprocessing.get_context('spawn')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, sender))
    process.start()
    sender.close()
    try:
        while True:
            result = receiver.recv()
            print(json.dumps(result), flush=True)
            yield result
    except EOFError:
        process.join()
    if process.exitcode:
        raise SystemExit(f'the {name} engine failed')


def done(work: Callable[..., None], arguments: tuple[Any, ...], what: str) -> None:
    """Run `work(*arguments)` in a process and wait for its end.

    Raises:
        SystemExit: it failed; the message says what could not be done.
    """
    process = multiprocessing.get_context('spawn').Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(what)
