"""Does the importance delta find the tokens that a dense step decodes? (FOCUS, section 3)"""
from itertools import product

import torch
from torch import Tensor

from .reference_selection import rank

_BUDGETS = (2, 4, 8)
_RANKINGS = ('top', 'random', 'bottom')


class Recall:
    """A trace of dense steps (option score_always): counts decoded tokens among the K best, K worst and K random masked
    ones. Steps with no more than K masked tokens count for nothing."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.found = dict.fromkeys(product(_RANKINGS, _BUDGETS), 0)
        self.decoded = dict.fromkeys(product(_RANKINGS, _BUDGETS), 0)

    def __call__(self, record: dict[str, Tensor]) -> None:
        """One step's record; that of prefill holds no scores and is passed over."""
        if 'delta' not in record:
            return
        delta, masked, count = record['delta'], record['masked'], record['masked'].sum(1, keepdim=True)
        for ranking, budget in product(_RANKINGS, _BUDGETS):
            if ranking == 'random':
                score = torch.rand(delta.shape, device=delta.device, generator=self.generator)
            else:
                score = delta if ranking == 'top' else -delta
            decoded = record['unmasked'] & (count > budget)
            self.found[ranking, budget] += int((decoded & (rank(score, masked) < budget)).sum())
            self.decoded[ranking, budget] += int(decoded.sum())

    def shares(self) -> dict[str, float]:
        """Share of decoded tokens that were found, by ranking and budget."""
        return {f'{ranking}{budget}': round(self.found[ranking, budget] / max(1, total), 4)
                for (ranking, budget), total in self.decoded.items()}
