"""The state of the batch between steps."""
from types import SimpleNamespace

import pytest
import torch

from lmdeploy_focus.dflash.strategy import DFlashEngineStrategy, DFlashExtraInputs

K, TOKENS = 3, 5


def batch(rows, seen):
    known = torch.eye(rows, TOKENS).bool() if seen else None
    return DFlashExtraInputs(output_draft_token_ids=torch.arange(rows * K).view(rows, K),
                             num_rejected_tokens=torch.arange(rows), seen=known)


@pytest.mark.parametrize('first,second', [(True, True), (True, False), (False, True), (False, False)])
def test_merging_keeps_rows_apart(first, second):
    """Red when a batch without a penalty shifts the tokens that another's answers have: then a penalty counts those of
    another sequence."""
    one, two = batch(2, first), batch(3, second)
    merged = one.merge(two)
    assert merged.output_draft_token_ids.shape == (5, K)
    if not (first or second):
        assert merged.seen is None
        return
    expected = torch.cat([torch.eye(2, TOKENS) * first, torch.eye(3, TOKENS) * second]).bool()
    assert torch.equal(merged.seen, expected)
    kept = merged.update(SimpleNamespace(indices=torch.tensor([1, 3])))
    assert torch.equal(kept.seen, expected[[1, 3]])
    assert kept.num_rejected_tokens.tolist() == [1, 1]


@pytest.mark.parametrize('k', [1, 4, 15])
def test_room_ahead_of_the_host(k):
    """Red when a step's last drafted token may lie on a page that was not taken: positions are counted one by one."""
    strategy = DFlashEngineStrategy(SimpleNamespace(prefill_interval=16), None, k)
    known = 40
    counted = known + k  # with the drafted tokens that the host was told
    emitted = known
    for _ in range(2):  # the step before, whose result the host has not seen, and the one it prepares
        emitted += k + 1
        last_written = emitted - 1 + k  # the drafted block begins with the last emitted token
    assert last_written == counted + strategy.get_num_required_tokens() - 1
    assert strategy.get_prealloc_size(True) >= strategy.get_num_required_tokens()
