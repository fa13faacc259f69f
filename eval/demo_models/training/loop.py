"""The time-boxed training loop, and the journal that it writes."""
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .optimizer import Optimizer

_SYNCHRONISE_EVERY = 4
_REPORT_SECONDS = 10


class Journal:
    """What happened: printed at once, kept for journal.json."""

    def __init__(self) -> None:
        self.start = time.time()
        self.entries: dict = {}

    def log(self, text: str) -> None:
        """Print with the time since the start."""
        print(f'[{time.time() - self.start:6.1f}s] {text}', flush=True)

    def write(self, folder: Path) -> None:
        """Save as journal.json."""
        (folder / 'journal.json').write_text(json.dumps(self.entries, indent=1))


def learning_rate_factor(fraction: float, warm_up: float = 0.02, decay_from: float = 0.35) -> float:
    """Trapezoid over the elapsed fraction of the time."""
    if fraction < warm_up:
        return max(0.02, fraction / warm_up)
    return 1.0 if fraction < decay_from else max(0.0, (1.0 - fraction) / (1.0 - decay_from))


def cross_entropy(compiled: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Loss of each token under the tied head: hidden [..., C], embedding [V, C], targets [...] -> fp32 [...]."""
    def loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction='none').view(targets.shape)
    return torch.compile(loss, dynamic=False) if compiled else loss


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def warm_up(name: str, step: Callable[[], Tensor], layers: Iterable[nn.Module], parameters: Iterable[nn.Parameter],
            compiled: bool, journal: Journal) -> None:
    """Two forwards and backwards before the clock starts: compilation takes longer than many steps."""
    start = time.time()
    if compiled:
        for layer in layers:
            layer.compile(dynamic=False)
    parameters = list(parameters)
    for _ in range(2):
        step().backward()
        for parameter in parameters:
            parameter.grad = None
    synchronise()
    journal.log(f'{name}: warm-up {time.time() - start:.1f}s')


def train(name: str, step: Callable[[], Tensor], optimizer: Optimizer, minutes: float, tokens_per_step: int,
          poll: Callable[[], None], journal: Journal) -> None:
    """Runs `step` (it returns the loss) for that long; the learning rate follows the elapsed time.

    Raises:
        RuntimeError: the loss is not a number.
    """
    start = reported = time.time()
    steps = reported_steps = 0
    total: Tensor | None = None
    curve: list[list[float]] = []
    while (fraction := (time.time() - start) / (minutes * 60)) < 1:
        loss = step()
        loss.backward()
        factor = learning_rate_factor(fraction)
        optimizer.step(factor)
        total = loss.detach() if total is None else total + loss.detach()
        steps += 1
        if steps % _SYNCHRONISE_EVERY == 0:
            synchronise()
            now = time.time()
            if now - reported >= _REPORT_SECONDS or steps == _SYNCHRONISE_EVERY:
                mean = float(total) / (steps - reported_steps)
                speed = (steps - reported_steps) * tokens_per_step / (now - reported)
                journal.log(f'{name} step {steps} loss {mean:.4f} lr x{factor:.3f} {speed / 1e6:.2f} Mtok/s')
                curve.append([round(now - start, 1), steps, round(mean, 5)])
                total, reported, reported_steps = None, now, steps
                if mean != mean:
                    raise RuntimeError(f'{name}: the loss of step {steps} is not a number')
        if steps % (4 * _SYNCHRONISE_EVERY) == 0:
            poll()
    if total is not None:
        curve.append([round(time.time() - start, 1), steps, round(float(total) / (steps - reported_steps), 5)])
    final = curve[-1][2] if curve else None
    megatokens = round(steps * tokens_per_step / 1e6, 1)
    journal.log(f'{name} done: {steps} steps, {megatokens} Mtok, final loss {final}')
    journal.entries[name] = {'steps': steps, 'megatokens': megatokens, 'final_loss': final,
                             'curve: seconds, step, loss': curve}
