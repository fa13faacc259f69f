"""How many drafted tokens were accepted: in a step, and in all steps of a request."""
from dataclasses import dataclass
from typing import Any

import numpy as np
from lmdeploy.pytorch.messages import MessageStatus


@dataclass(frozen=True)
class Acceptance:
    """The verifications of one request, or of several together.

    A drafted token is accepted when it became part of an answer; those that the target agreed with but that came after
    a stop token or a cap did not. A stop token that was drafted counts, as it ended the answer.

    steps_by_accepted: entry n is the number of verifications in which n drafted tokens were accepted; k + 1 entries for
        k drafted tokens in a step
    """
    steps_by_accepted: tuple[int, ...]

    @staticmethod
    def none(draft_tokens: int) -> 'Acceptance':
        """No verification yet, of `draft_tokens` tokens each."""
        return Acceptance((0, ) * (draft_tokens + 1))

    @property
    def verify_steps(self) -> int:
        """Verifications."""
        return sum(self.steps_by_accepted)

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted for them."""
        return self.verify_steps * (len(self.steps_by_accepted) - 1)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that became part of the answer."""
        return sum(accepted * steps for accepted, steps in enumerate(self.steps_by_accepted))

    @property
    def rejected_tokens(self) -> int:
        """Drafted tokens that did not."""
        return self.drafted_tokens - self.accepted_tokens

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """How often the drafted token of each position, 0 to k - 1, was accepted."""
        counts = np.cumsum(self.steps_by_accepted[::-1])[::-1][1:]
        return tuple(counts.tolist())

    @property
    def length(self) -> float:
        """Acceptance length as LMDeploy's metrics have it: accepted tokens of a step plus the target's own; not a
        number without a step."""
        return 1 + self.accepted_tokens / self.verify_steps if self.verify_steps else float('nan')

    def __add__(self, other: 'Acceptance') -> 'Acceptance':
        """Both together; they must have been drafted by the same engine."""
        return Acceptance(tuple(a + b for a, b in zip(self.steps_by_accepted, other.steps_by_accepted, strict=True)))

    def __sub__(self, earlier: 'Acceptance') -> 'Acceptance':
        """What has come since `earlier`."""
        return Acceptance(tuple(a - b for a, b in zip(self.steps_by_accepted, earlier.steps_by_accepted, strict=True)))


def accepted_in_step(outputs: Any, running: list[Any]) -> list[tuple[Any, int]]:
    """The sequences of a verification step with their accepted tokens, before the host's sequences learn of it.

    Args:
        outputs: LMDeploy's batched outputs of the step, on the host.
        running: its sequences; those that ended in the meantime are left out.
    """
    emitted = (np.asarray(outputs.next_token_ids).reshape(len(running), -1) >= 0).sum(1)
    stop = np.asarray(outputs.stop_pos)
    # The last emitted token is the target's own; what follows the place of the stop is not part of the answer.
    accepted = np.where(stop < 0, emitted - 1, np.minimum(emitted - 1, stop + 1))
    return [(sequence, count) for sequence, count in zip(running, accepted.tolist(), strict=True)
            if sequence.status == MessageStatus.RUNNING]
