"""Stage 2: the training loop. All that is drawn is a function of seed and step, so a resumed run repeats nothing and
loses nothing but the steps after its last save."""
import json
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eval.demo_models.network import Draft

from .acceptance import measure, report
from .layout import save_draft, write_atomically
from .objective import Objective, Outcome
from .options import Options
from .prompts import Sample
from .state import JOURNAL, load_state, save_state
from .target import Target

_WARM_UP, _LAST, _CLIP = 0.04, 0.05, 1.0
# Batches are cut from stretches of so many, sorted by length: little padding, and still another mixture in each pass.
_STRETCH = 16
_REPORT_EVERY = 10


def learning_rate_factor(step: int, steps: int) -> float:
    """Of the peak at step 0 ... steps - 1: linear over the first 4 %, then a cosine to 5 %."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - 1 - warm_up)
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * done))


class Batches:
    """Which samples a step sees."""

    def __init__(self, samples: Sequence[Sample], size: int, seed: int) -> None:
        self.samples, self.size, self.seed = samples, min(size, len(samples)), seed
        self.per_pass = len(samples) // self.size
        self.passed, self.order = -1, [[0]]

    def __getitem__(self, step: int) -> list[Sample]:
        if step // self.per_pass != self.passed:
            self.passed = step // self.per_pass
            self.order = self._draw(random.Random(f'batches-{self.seed}-{self.passed}'))
        return [self.samples[index] for index in self.order[step % self.per_pass]]

    def _draw(self, rng: random.Random) -> list[list[int]]:
        indices = list(range(len(self.samples)))
        rng.shuffle(indices)
        indices = indices[:self.per_pass * self.size]
        batches: list[list[int]] = []
        for start in range(0, len(indices), _STRETCH * self.size):
            stretch = sorted(indices[start:start + _STRETCH * self.size],
                             key=lambda index: len(self.samples[index].prompt) + len(self.samples[index].answer))
            batches += [stretch[first:first + self.size] for first in range(0, len(stretch), self.size)]
        rng.shuffle(batches)
        return batches


class _Stop:
    """Whether the process was asked to end; a step is finished and saved first."""

    def __enter__(self) -> '_Stop':
        self.asked = False
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        # The second time the process ends at once.
        signal.signal(number, self.before[signal.Signals(number)])

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Trainer:
    """One run.

    Args:
        target, draft: on one device, the draft in fp32.
        samples: for training, each with an answer of at least two tokens; held_out: with greedy answers.
        options: see there; OUTPUT is there already.

    Attributes:
        step: steps done. losses: of every step. acceptance: measurements, each with its step.
    """

    def __init__(self, target: Target, draft: Draft, samples: Sequence[Sample], held_out: Sequence[Sample],
                 options: Options) -> None:
        self.target, self.draft, self.held_out, self.options = target, draft, held_out, options
        self.batches = Batches(samples, options.batch, options.seed)
        longest = max(len(sample.prompt) + len(sample.answer) for sample in samples)
        self.objective = Objective(target, draft, options.anchors, longest + options.block_size)
        matrices = [parameter for parameter in draft.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in draft.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW([{'params': matrices, 'weight_decay': 0.01},
                                            {'params': vectors, 'weight_decay': 0.0}], lr=options.lr, betas=(0.9, 0.95))
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.acceptance: list[dict[str, Any]] = []

    def resume(self) -> bool:
        """Go on from the last save, or begin."""
        state = load_state(self.options.output)
        if state is None:
            return False
        self.draft.load_state_dict(state['draft'])
        self.optimizer.load_state_dict(state['optimizer'])
        self.step, self.seconds = state['step'], state['seconds']
        self.losses, self.acceptance = state['losses'], state['acceptance']
        return True

    def save(self) -> None:
        """Write the drafter, the journal and, last, the state."""
        save_draft(self.draft, self.target.plan, self.options.output)
        self.write_journal()
        save_state(self.options.output, {
            'draft': self.draft.state_dict(), 'optimizer': self.optimizer.state_dict(), 'step': self.step,
            'seconds': self.seconds, 'losses': self.losses, 'acceptance': self.acceptance})

    def write_journal(self, **more: Any) -> None:
        """Write training.json."""
        journal = {'steps': self.step, 'seconds': round(self.seconds, 1), 'settings': self.options.fixed(),
                   'acceptance': self.acceptance, **more, 'losses': [round(loss, 5) for loss in self.losses]}
        write_atomically(self.options.output / JOURNAL, json.dumps(journal, indent=1) + '\n')

    def train_step(self) -> tuple[Outcome, int]:
        """One update; returns the outcome and how many tokens went through the target.

        Raises:
            RuntimeError: the loss is not a number.
        """
        options, samples = self.options, self.batches[self.step]
        generator = torch.Generator().manual_seed((options.seed + 1) * 1_000_003 + self.step)
        outcome = self.objective(samples, generator)
        outcome.loss.backward()
        norm = nn.utils.clip_grad_norm_(self.draft.parameters(), _CLIP)
        if not torch.isfinite(norm):
            raise RuntimeError(f'the loss of step {self.step} is {float(outcome.loss)}, its gradient {float(norm)}; a '
                               f'lower --lr than {options.lr} may help, from the last save on or in another --output')
        factor = learning_rate_factor(self.step, options.steps)
        for group in self.optimizer.param_groups:
            group['lr'] = options.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return outcome, sum(len(sample.prompt) + len(sample.answer) for sample in samples)

    def measure(self) -> float:
        """Measure the acceptance length of the held-out prompts, print and keep it."""
        found = measure(self.target, self.draft, self.held_out, self.target.plan.mask_token,
                        self.options.max_new_tokens, self.options.generation_batch)
        self.acceptance.append({'step': self.step, **report(found)})
        tqdm.write(f'step {self.step}: acceptance length {found.length:.3f} on {len(self.held_out)} held-out prompts',
                   file=sys.stderr)
        return found.length

    def run(self) -> bool:
        """Train to the end; False if the process was asked to stop before, after a save."""
        options, pending = self.options, _Pending(self.options.block_size - 1)
        last = time.monotonic()
        with _Stop() as stop, tqdm(total=options.steps, initial=self.step, desc='training', unit='step',
                                   file=sys.stderr) as bar:
            while self.step < options.steps and not stop.asked:
                pending.add(*self.train_step())
                bar.update()
                final = self.step == options.steps
                measured = final or self.step % options.evaluate_every == 0
                saved = measured or stop.asked or self.step % options.save_every == 0
                if saved or self.step % _REPORT_EVERY == 0:
                    losses, text = pending.take()
                    self.losses += losses
                    bar.set_postfix_str(text)
                    self.seconds, last = self.seconds + time.monotonic() - last, time.monotonic()
                if measured:
                    self.measure()
                    last = time.monotonic()
                if saved:
                    self.save()
            if stop.asked:
                self.losses += pending.take()[0]
                self.save()
        return self.step >= options.steps


class _Pending:
    """Outcomes that have not been read from the device yet: reading waits for it."""

    def __init__(self, slots: int) -> None:
        self.losses: list[Tensor] = []
        self.hits = torch.zeros(2, slots)
        self.tokens, self.since = 0, time.monotonic()

    def add(self, outcome: Outcome, tokens: int) -> None:
        self.losses.append(outcome.loss.detach())
        self.hits = self.hits.to(outcome.right.device) + torch.stack([outcome.right, outcome.counted])
        self.tokens += tokens

    def take(self) -> tuple[list[float], str]:
        """The losses, and a line about them: loss, accuracy by slot, tokens a second."""
        if not self.losses:
            return [], ''
        losses = torch.stack(self.losses).tolist()
        share = (self.hits[0] / self.hits[1].clamp_min(1)).tolist()
        shown = [slot for slot in (1, 2, 4, 8, 15) if slot <= len(share)]
        accuracy = ' '.join(f'{slot}:{share[slot - 1]:.2f}' for slot in shown)
        speed = self.tokens / max(1e-9, time.monotonic() - self.since)
        self.losses, self.hits = [], torch.zeros_like(self.hits)
        self.tokens, self.since = 0, time.monotonic()
        return losses, f'loss {sum(losses) / len(losses):.3f}, right {accuracy}, {speed:.0f} tokens/s'
