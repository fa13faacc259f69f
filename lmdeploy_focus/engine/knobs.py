"""A request's own alpha and confidence threshold, on the way from its generation config to its row of state."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.messages import SamplingParam
from torch import Tensor

from ..config import BLOCK_LENGTHS
from ..request import FocusGenerationConfig


@dataclass
class FocusSamplingParam(SamplingParam):
    """LMDeploy's parameters of a sequence, which outlive a preemption, with those of a `FocusGenerationConfig`.

    Attributes:
        focus_alpha, confidence_threshold: None is the engine's own.
    """
    focus_alpha: float | None = None
    confidence_threshold: float | None = None

    @classmethod
    def of(cls, param: SamplingParam, gen_config: FocusGenerationConfig) -> 'FocusSamplingParam':
        """`param`, which LMDeploy made of `gen_config`, with what it left out."""
        return cls(**vars(param), focus_alpha=gen_config.focus_alpha,
                   confidence_threshold=gen_config.confidence_threshold)


def own_knobs(params: Sequence[Any], alpha: float, threshold: float) -> tuple[Tensor, Tensor]:
    """Alphas and thresholds of S sequences, [S] float64 each.

    Args:
        params: LMDeploy's SamplingParam of each, or ours.
        alpha, threshold: the engine's, for those that do not say.
    """

    def of(name: str, default: float) -> list[float]:
        given = [getattr(param, name, None) for param in params]
        return [default if value is None else value for value in given]

    # as with the engine's option: a larger budget keeps every masked position just the same
    alphas = torch.tensor(of('focus_alpha', alpha), dtype=torch.float64).clamp_max(max(BLOCK_LENGTHS))
    return alphas, torch.tensor(of('confidence_threshold', threshold), dtype=torch.float64)
