"""Generates training rows in background processes.

    python -m eval.demo_models.training.producer TOKENIZER OUT SEED WORKER WORKERS ROWS LENGTH SHARDS
"""
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .packing import make_shard

_ROOT = Path(__file__).resolve().parents[3]
_ONE_THREAD = {'TOKENIZERS_PARALLELISM': 'false', 'RAYON_NUM_THREADS': '1', 'OMP_NUM_THREADS': '1',
               'OPENBLAS_NUM_THREADS': '1'}


class Producer:
    """Background generation: processes write shards into a folder, `poll` takes them out.

    Args:
        tokenizer: path of a tokenizer.json.
        folder: for the shards; made if it is not there.
        workers: how many processes.
        rows, length: of a shard.
        shards: how many of them in all.
    """

    def __init__(self, tokenizer: Path, folder: Path, seed: int, workers: int, rows: int, length: int, shards: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        command = [sys.executable, '-m', __name__, str(tokenizer.resolve()), str(folder.resolve()), str(seed)]
        sizes = [str(size) for size in (workers, rows, length, shards)]
        environment = dict(os.environ, PYTHONPATH=str(_ROOT), **_ONE_THREAD)
        self.processes = [subprocess.Popen([*command, str(worker), *sizes], env=environment)
                          for worker in range(workers)]

    def poll(self) -> list[np.ndarray]:
        """The shards that were finished since the last call, uint16 [rows, length]."""
        shards = []
        for path in sorted(self.folder.glob('[0-9]*.npy')):
            shards.append(np.load(path))
            path.unlink()
        return shards

    def alive(self) -> bool:
        """Whether a process is still working."""
        return any(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def produce(tokenizer: str, folder: str, seed: int, worker: int, workers: int, rows: int, length: int,
            shards: int) -> None:
    """Body of a worker: every `workers`-th shard. A shard gets its name when it is complete."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    loaded = Tokenizer.from_file(tokenizer)
    for shard in range(worker, shards, workers):
        unfinished = Path(folder, f'.{shard:06d}.npy')
        np.save(unfinished, make_shard(loaded, seed * 1_000_003 + shard, rows, length))
        unfinished.rename(Path(folder, f'{shard:06d}.npy'))


if __name__ == '__main__':
    produce(*sys.argv[1:3], *map(int, sys.argv[3:]))
