"""The host's record of a sequence: a complete block is history at once, and is prefilled again if its commit never ran.
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SchedulerSession, SequenceMeta, UpdateTokenMode

from lmdeploy_focus.engine.sampling import FocusSamplingStrategy
from lmdeploy_focus.engine.sequence import FocusSequenceStrategy

LENGTH, MASK_TOKEN = 4, 99
MASKED, UNMASKED, CACHED = 0, 1, 2


class Host:
    """One running sequence, told of steps as the engine's loop does."""

    def __init__(self, prompt):
        strategy = FocusSequenceStrategy(block_size=LENGTH, dllm_mask_token=MASK_TOKEN)
        meta = SequenceMeta(16, strategy=strategy, sampling_strategy=FocusSamplingStrategy(0))
        lifecycle = SimpleNamespace(new_sequence_id=lambda: 0, add_sequence=lambda sequence, status: None)
        self.strategy = strategy
        self.sequence = SchedulerSession(0, meta, lifecycle).add_sequence(np.array(prompt), SamplingParam())
        self.state = SimpleNamespace(status=MessageStatus.RUNNING, finish=self.finish)
        self.sequence._state = self.state
        full = len(prompt) % LENGTH == 0
        last = prompt[-LENGTH:] if full else prompt[len(prompt) // LENGTH * LENGTH:]
        last = last + [MASK_TOKEN] * (LENGTH - len(last))
        self.tell(last, [CACHED if full else UNMASKED if token != MASK_TOKEN else MASKED for token in last], None)

    def finish(self):
        self.state.status = MessageStatus.STOPPED

    def tell(self, ids, mask, ran, stop_pos=None):
        """One step's outputs; `ran` is None for a prefill."""
        stopped = stop_pos is not None
        outputs = SimpleNamespace(
            next_token_ids=torch.tensor(ids), stopped=torch.tensor([stopped]), model_metas=None,
            stop_pos=torch.tensor([stop_pos if stopped else LENGTH - 1]),
            extra_outputs=SimpleNamespace(dllm_mask=torch.tensor(mask, dtype=torch.uint8),
                                          ran=None if ran is None else torch.tensor([ran])))
        self.strategy.update_running([self.sequence], outputs, None, SimpleNamespace(is_decoding=ran is not None))

    def block(self, first):
        """A step that completes a block with the tokens first, first + 1 and so on."""
        self.tell([first + p for p in range(LENGTH)], [UNMASKED] * LENGTH, True)

    def idle(self, ran):
        """A step that decides nothing."""
        self.tell([MASK_TOKEN] * LENGTH, [MASKED] * LENGTH, ran)

    def says(self):
        """Tokens before the block, the block, all that are valid, and what waits for its commit."""
        own = self.sequence
        return own.num_history_ids, own.token_ids.tolist(), own.num_valid_ids, own.uncommitted


@pytest.mark.parametrize('prompt', [1, 3, 4, 5, 8, 11])
def test_blocks_follow_each_other_at_once(prompt):
    """Red when: a complete block waits for a step of its own, as stock's does, or counts as valid text twice."""
    host = Host(list(range(prompt)))
    start = prompt // LENGTH * LENGTH
    assert host.says()[0] == start and host.says()[2] == prompt
    for blocks in range(1, 4):
        host.block(10 * blocks)
        end = start + blocks * LENGTH
        assert host.says() == (end, [MASK_TOKEN] * LENGTH, end, LENGTH)
        assert host.sequence.num_new_tokens == end - prompt
    assert host.sequence.all_ids[start:end].tolist() == [10 * b + p for b in (1, 2, 3) for p in range(LENGTH)]
    assert host.sequence.all_dllm_mask[:end].tolist() == [CACHED] * end


def test_a_commit_is_done_when_its_step_has_run():
    """Red when: the host believes that a block is committed which had to wait with its sequence, or never learns it."""
    host = Host([1, 2, 3, 4, 5])
    host.block(10)
    for _ in range(2):
        host.idle(ran=False)
        assert host.says() == (8, [MASK_TOKEN] * LENGTH, 8, LENGTH)
    host.idle(ran=True)
    assert host.says() == (8, [MASK_TOKEN] * LENGTH, 8, 0)
    host.block(20)
    host.block(30)
    assert host.says() == (16, [MASK_TOKEN] * LENGTH, 16, LENGTH)


@pytest.mark.parametrize('ran', [False, True])
def test_a_new_turn_prefills_what_was_not_committed(ran):
    """A request is cancelled between a block and its commit. Red when: the next turn builds on a KV that is not final,
    prefills what is committed, or loses or doubles a token."""
    host = Host([1, 2, 3, 4, 5])
    host.block(10)
    host.idle(ran)
    host.finish()
    host.sequence.update_token_ids(np.array([50, 51]), mode=UpdateTokenMode.INPUTS)
    text = [1, 2, 3, 4, 10, 11, 12, 13, 50, 51]
    history = 8 if ran else 4
    assert host.says() == (history, text[history:] + [MASK_TOKEN] * 2, 10, 0)
    assert host.sequence.all_dllm_mask[history:].tolist() == [UNMASKED] * (10 - history) + [MASKED] * 2
    assert host.sequence.output_start_pos == host.sequence.input_end_pos == 10


def test_a_preempted_sequence_begins_anew():
    """Red when: what waits for its commit is taken off a history that preemption has taken back already."""
    host = Host([1, 2, 3, 4, 5])
    host.block(10)
    host.sequence.set_step(0)
    assert host.says()[0] == 0 and host.says()[3] == 0
    host.sequence.update_token_ids(np.array([50]), mode=UpdateTokenMode.INPUTS)
    assert host.says()[0] == 0 and host.says()[1][:9] == [1, 2, 3, 4, 10, 11, 12, 13, 50]


def test_an_end_amid_a_block():
    """Red when: a sequence that has stopped begins another block, or counts what lies behind its end."""
    host = Host([1, 2, 3, 4, 5])
    host.tell([10, 11, 12, 13], [UNMASKED] * LENGTH, True, stop_pos=2)
    assert host.says()[0] == 4 and host.says()[2] == 7 and host.sequence.num_new_tokens == 2
    assert host.sequence.generated_ids.tolist() == [11, 12]
