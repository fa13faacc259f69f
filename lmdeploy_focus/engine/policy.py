"""Policy: whether a step evicts (option focus_policy)."""


class EvictionPolicy:
    """Decides each step's mode.

    'always' evicts, 'never' leaves the delayed cache alone. 'auto' evicts where it pays: without a measured table every
    step evicts, because fewer rows never cost more arithmetic.
    """

    def __init__(self, mode: str) -> None:
        if mode not in ('auto', 'always', 'never'):
            raise ValueError(f'focus_policy={mode!r} is not one of auto, always, never')
        self.mode = mode

    def evicting(self) -> bool:
        """Whether the next step may evict."""
        return self.mode != 'never'
