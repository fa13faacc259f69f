"""Training rows on the device."""
import time

import numpy as np
import torch
from torch import Tensor

from .producer import Producer


def unpack(raw: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [S, T] -> token ids int64 and the assistant flag bool."""
    return (raw.int() & 0xFFF).long(), raw < 0


class Rows:
    """int16 rows in device memory: each is used once as it arrives, then all of them in random passes."""

    def __init__(self, length: int, capacity: int, device: str, producer: Producer | None = None):
        self.device, self.producer = device, producer
        self.data = torch.empty(capacity, length, dtype=torch.int16, device=device)
        self.count = self.position = self.passes = 0
        self.order: Tensor | None = None

    def add(self, rows: np.ndarray) -> None:
        """Append uint16 [rows, length]; what exceeds the capacity is left out."""
        added = min(len(rows), len(self.data) - self.count)
        self.data[self.count:self.count + added] = torch.from_numpy(rows[:added].view('int16')).to(self.device)
        self.count += added

    def poll(self) -> None:
        """Take what the producer has finished."""
        if self.producer is None:
            return
        working = self.producer.alive()
        for rows in self.producer.poll():
            self.add(rows)
        if not working:
            self.producer = None

    def wait(self, count: int) -> None:
        """Block until there are that many rows.

        Raises:
            RuntimeError: the producer ended before.
        """
        self.poll()
        while self.count < count:
            if self.producer is None:
                raise RuntimeError(f'{self.count} rows of training data were produced, {count} are needed')
            time.sleep(0.05)
            self.poll()

    def shuffle(self) -> None:
        """Begin a random pass over all rows."""
        self.order = torch.randperm(self.count, device=self.device)
        self.position = 0

    def batch(self, size: int) -> Tensor:
        """int16 [size, length]."""
        if self.order is None and self.position + size <= self.count:
            rows = self.data[self.position:self.position + size]
        else:
            if self.order is None or self.position + size > len(self.order):
                self.shuffle()
                self.passes += 1
                if self.count < size:
                    self.order = torch.randint(self.count, (size,), device=self.device)
            rows = self.data[self.order[self.position:self.position + size]]
        self.position += size
        return rows
