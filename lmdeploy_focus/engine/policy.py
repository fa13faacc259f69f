"""Policy: whether steps evict (option focus_policy)."""


class EvictionPolicy:
    """Decides the mode of an engine's steps.

    'always' evicts, 'never' leaves the delayed cache alone. 'auto' evicts too: a step with fewer rows is never slower
    by more than the ranking takes (25 us of a step of 5 ms), and focus's threshold, lower than that of dense decoding,
    is only right where unlikely tokens do not compete.
    """

    def __init__(self, mode: str) -> None:
        if mode not in ('auto', 'always', 'never'):
            raise ValueError(f'focus_policy={mode!r} is not one of auto, always, never')
        self.mode = mode

    def evicting(self) -> bool:
        """Whether steps evict."""
        return self.mode != 'never'
