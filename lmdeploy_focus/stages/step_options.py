"""The options of a step; names and values are those of the user's options."""
from dataclasses import dataclass


@dataclass(frozen=True)
class StepOptions:
    """What holds for every step of an engine.

    Attributes:
        selection, keep, cache, kv_visible, commit: options `focus_*`.
        strategy: option `dllm_unmasking_strategy`.
        tokens_per_step: positions that a step of the static and sequential strategies decides.
        mask_token: what undecided positions hold; never sampled.
        page_size: G.
        splits: into how many parts attention cuts the keys; None: as the batch has it best.
    """
    selection: str
    keep: int | None
    cache: str
    kv_visible: str
    commit: str
    strategy: str
    tokens_per_step: int
    mask_token: int
    page_size: int
    splits: int | None = None

    @property
    def sequential(self) -> int:
        """The next this many masked positions are always kept."""
        return self.tokens_per_step if self.strategy == 'sequential' else 0
