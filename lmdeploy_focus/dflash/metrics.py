"""LMDeploy's `spec_decode` metrics, fed with an `Acceptance`."""
from typing import Any

import numpy as np

from .acceptance import Acceptance


def add(stats: Any, acceptance: Acceptance) -> None:
    """Add steps to LMDeploy's `SpeculativeDecodingStats` of the same number of drafted tokens."""
    stats.num_drafts += acceptance.verify_steps
    stats.num_draft_tokens += acceptance.drafted_tokens
    stats.num_accepted_tokens += acceptance.accepted_tokens
    stats.num_accepted_tokens_per_pos += np.array(acceptance.accepted_per_position)
