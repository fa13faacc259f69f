"""Start `lmdeploy serve api_server`, wait until it answers, read its metrics, stop it."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

_METRIC = re.compile(r'^lmdeploy_focus:(\w+)_total(?:\{.*\})? (\S+)$', re.MULTILINE)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class ApiServer:
    """A server process, as a context manager.

    Args:
        model: path or id of the model.
        flags: further arguments of `lmdeploy serve api_server`.
        timeout: seconds until the server must answer.
        waiting: called every second with the seconds that have passed.

    Raises:
        RuntimeError: on entry, when the server ended or did not answer in time; the message has the end of its log.
    """

    def __init__(self, model: str | Path, flags: Sequence[str] = (), timeout: float = 300.0,
                 waiting: Callable[[int], None] | None = None) -> None:
        self.port = free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        self.command = [str(Path(sys.executable).with_name('lmdeploy')), 'serve', 'api_server', str(model),
                        '--server-name', '127.0.0.1', '--server-port', str(self.port), *flags]
        self.timeout, self.waiting = timeout, waiting
        self.process: subprocess.Popen

    def __enter__(self) -> 'ApiServer':
        self._log = tempfile.TemporaryFile('w+', errors='replace')
        # a process group of its own: the engine process goes with it, whatever state it is in
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self._log,
                                        stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.stop()

    def log(self) -> str:
        """All that the server has printed."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def counters(self) -> dict[str, int]:
        """The counters of lmdeploy-focus among the server's metrics, by name."""
        with urllib.request.urlopen(f'{self.url}/metrics', timeout=30) as answer:
            return {name: int(float(value)) for name, value in _METRIC.findall(answer.read().decode())}

    def stop(self) -> None:
        """End the server and its engine process."""
        for signum, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, signum)
            except ProcessLookupError:
                break
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def _wait(self) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < self.timeout:
            if self.process.poll() is not None:
                raise RuntimeError(f'the server ended with exit status {self.process.returncode}:\n{self._tail()}')
            try:
                with urllib.request.urlopen(f'{self.url}/v1/models', timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass
            if self.waiting is not None:
                self.waiting(int(time.monotonic() - begin))
            time.sleep(1)
        raise RuntimeError(f'the server did not answer within {self.timeout:.0f} s:\n{self._tail()}')

    def _tail(self) -> str:
        return '\n'.join(self.log().splitlines()[-30:])
