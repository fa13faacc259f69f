"""Runs the stages of a decode step on a model; prefill stays with LMDeploy's own runner."""
from typing import Protocol

from ..stages.decoder import Decoder, KVCache
from ..stages.state import FocusState
from ..stages.step import Denoised, StepOptions, denoise
from ..stages.view import FocusView


class FocusModel(Protocol):
    """A model of `lmdeploy_focus.models`."""

    decoder: Decoder


class FocusGraphRunner:
    """Eager execution of the whole step."""

    def __init__(self, model: FocusModel) -> None:
        self.decoder = model.decoder

    def denoise(self, caches: list[KVCache], view: FocusView, state: FocusState, options: StepOptions,
                evicting: bool) -> Denoised:
        """The step's forward; see :func:`lmdeploy_focus.stages.step.denoise`."""
        return denoise(self.decoder, caches, view, state, options, evicting)
