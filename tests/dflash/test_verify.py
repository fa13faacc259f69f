"""Acceptance of drafted tokens, against a loop over tokens."""
import itertools

import pytest
import torch

from lmdeploy_focus.dflash.verify import accept


def accept_one(sampled, drafted):
    """What one sequence emits, and how many rows were rejected."""
    emitted = [sampled[0]]
    for position, token in enumerate(drafted):
        if token != emitted[-1]:
            break
        emitted.append(sampled[position + 1])
    return emitted, len(sampled) - len(emitted)


@pytest.mark.parametrize('k', [1, 2, 4])
def test_every_pattern_of_two_tokens(k):
    """Red when a sample after a rejected token is emitted, an accepted one is lost, or the bonus token is another's."""
    cases = [(list(pattern[:k + 1]), list(pattern[k + 1:])) for pattern in itertools.product((5, 7), repeat=2 * k + 1)]
    emitted, rejected, last = accept(torch.tensor([sampled for sampled, _ in cases]),
                                     torch.tensor([drafted for _, drafted in cases]))
    for row, (sampled, drafted) in enumerate(cases):
        expected, lost = accept_one(sampled, drafted)
        assert emitted[row].tolist() == expected + [-1] * lost
        assert (int(rejected[row]), int(last[row])) == (lost, expected[-1])
