"""What a training run is told."""
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Settings:
    """Options of a run; batches are in rows of `length` tokens, minutes exclude compilation.

    `anchors` are the drafted blocks of a row, `policy_batch` and `policy_new` the answers of the target that the
    drafter is trained on, `decodability` the weight of the early-layer term (`decodability.py`), `rows_at_start` what
    a phase waits for.
    """

    out: Path
    device: str
    seed: int = 0
    minutes_ar: float = 3.5
    minutes_sdar: float = 4.0
    minutes_dflash: float = 2.5
    length: int = 768
    batch_ar: int = 96
    batch_sdar: int = 64
    batch_dflash: int = 96
    anchors: int = 32
    policy_batch: int = 4096
    policy_new: int = 320
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    megatokens: float = 320
    shard_rows: int = 1024
    rows_at_start: int = 4096
    decodability: float = 0.3
    compile: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.bfloat16 if self.device == 'cuda' else torch.float32
