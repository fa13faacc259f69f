"""Stops: end-of-sequence token, stop words and length cap (known faults U1 and B3)."""
import torch

from lmdeploy_focus.engine.step_inputs import FocusExtraInputs
from lmdeploy_focus.engine.stopping import FocusStoppingCriteria

EOS = 7


class _Inputs:

    def __init__(self, history, length):
        self.history_lengths = torch.tensor(history)
        self.seq_length = torch.full((len(history), ), length)


def _step(tokens, cap, start, history, complete=True):
    """One step of one sequence: stopped, last block position that is emitted."""
    length = len(tokens)
    criteria = FocusStoppingCriteria(torch.tensor([cap]), torch.tensor([start]))
    mask = torch.full((length, ), 1 if complete else 0, dtype=torch.uint8)
    extra = FocusExtraInputs(dllm_mask=mask, output_start=torch.tensor([start]))
    stopped, stop_pos, after = criteria.step(torch.tensor(tokens), torch.tensor([[EOS, -1]]),
                                             inputs=_Inputs([history], length), extra_inputs=extra)
    return bool(stopped), int(stop_pos), int(after.num_appendable_ids)


def test_the_first_of_cap_and_eos_wins():
    """Every pair in one block. Red with stock's rule, where the cap's position wins over an earlier EOS."""
    length = 8
    for eos in range(length):
        for cap in range(1, length + 1):
            tokens = [10 + i for i in range(length)]
            tokens[eos] = EOS
            stopped, position, _ = _step(tokens, cap, start=64, history=64)
            assert (stopped, position) == (True, min(eos, cap - 1)), (eos, cap)


def test_stop_words_of_the_prompt_do_not_count():
    """Every split of a block between prompt and output. Red when the output's start is taken from the padded prompt."""
    length = 8
    for prompt in range(length):
        for eos in range(length):
            tokens = [10 + i for i in range(length)]
            tokens[eos] = EOS
            stopped, position, _ = _step(tokens, cap=100, start=64 + prompt, history=64)
            assert stopped == (eos >= prompt), (prompt, eos)
            assert not stopped or position == eos


def test_unfinished_blocks_do_not_stop():
    """Red when a block is cut while some of its positions are still masked."""
    assert _step([EOS] * 8, cap=100, start=0, history=64, complete=False) == (False, 7, 100)


def test_the_cap_counts_down_by_whole_blocks():
    """Red when the remainder of tokens is lost between blocks."""
    assert _step([1] * 8, cap=20, start=0, history=64) == (False, 7, 12)
    assert _step([1] * 8, cap=12, start=0, history=64) == (False, 7, 4)
    assert _step([1] * 8, cap=4, start=0, history=64)[:2] == (True, 3)


def test_rows_are_independent():
    """Red when one row's stop words, cap or start is used for another."""
    criteria = FocusStoppingCriteria(torch.tensor([100, 3, 100]), torch.tensor([64, 64, 70]))
    tokens = torch.tensor([[1, EOS, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9, 8], [1, EOS, 2, 3, 4, 5, 6, 9]])
    extra = FocusExtraInputs(dllm_mask=torch.ones(24, dtype=torch.uint8), output_start=torch.tensor([64, 64, 70]))
    stopped, position, after = criteria.step(tokens.flatten(), torch.tensor([[EOS, -1], [EOS, -1], [9, 8]]),
                                             inputs=_Inputs([64] * 3, 8), extra_inputs=extra)
    assert stopped.tolist() == [True, True, True]
    assert position.tolist() == [1, 2, 7]
    kept = after.update(type('Delta', (), {'indices': torch.tensor([2])}))
    assert kept.output_start_pos.tolist() == [70]


def test_an_answer_may_end_in_the_prompts_own_block(pipelines, decode, demo_items):
    """Known fault B3 end to end: whatever the prompt's length modulo L, the first stop token ends the answer.

    Red when the engine emits a stop token's successors, or never looks into the prompt's block.
    """
    from lmdeploy import GenerationConfig
    pipe = pipelines(dtype='float32')
    tokenizer = pipe.async_engine.tokenizer
    free = decode(pipe, [item.prompt for item in demo_items[:16]], ignore_eos=True, max_new_tokens=64)
    for item, tokens in zip(demo_items[:16], free, strict=True):
        word = tokens[1]  # lies in the prompt's block, unless only one position of it was free
        config = GenerationConfig(max_new_tokens=64, do_sample=False, stop_token_ids=[word])
        answer = pipe([item.prompt], gen_config=config)[0]
        assert answer.finish_reason == 'stop'
        assert list(answer.token_ids) == tokens[:tokens.index(word)], tokenizer.decode(tokens)
