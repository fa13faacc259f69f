"""What the forward of a decode step hands to sampling and unmasking, however it ran."""
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..stages import step


@dataclass
class Denoised:
    """The result of a forward for S sequences.

    Attributes:
        logits: [R, V] of the masked kept rows; rows beyond their number may be anything.
        sequence, position: [R] int64 of each, -1 beyond.
        rightmost: [S] int64, largest block position that ran all layers.
        entered, kept: [S] int64, rows before and after eviction.
        greedy: most probable tokens and their confidences, [R] each, where the forward has them.
        delta: [S, L] importance delta of the masked tokens in block order, where the forward tells.
        positions: [S, L] int64, their block positions, -1 beyond the last.
    """
    logits: Tensor
    sequence: Tensor
    position: Tensor
    rightmost: Tensor
    entered: Tensor
    kept: Tensor
    greedy: tuple[Tensor, Tensor] | None = None
    delta: Tensor | None = None
    positions: Tensor | None = None


def from_stages(denoised: step.Denoised, logits: Tensor) -> Denoised:
    """Of a step that ran stage by stage; `logits` are those of the masked kept rows."""
    kept = denoised.kept
    return Denoised(logits, kept.sequence[kept.masked], kept.position[kept.masked], kept.rightmost(),
                    denoised.entered.rows_per_sequence(), kept.rows_per_sequence(), delta=denoised.delta,
                    positions=denoised.entered.candidates()[1])


def from_static_step(runner: Any, rows: int) -> Denoised:
    """Of a step on fixed buffers, whose suffix runs here on N = `rows` rows."""
    logits, tokens, scores = runner.finish(rows)
    sequence, position = runner.sampled(rows)
    entered, kept = runner.rows_per_sequence()
    return Denoised(logits, sequence, position, runner.rightmost(), entered, kept, greedy=(tokens, scores))
