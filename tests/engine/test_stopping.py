"""Stops: end-of-sequence token, stop words and length cap (known faults U1 and B3)."""
import pytest
import torch
from lmdeploy_focus.kernels.layout import Pace, Plan, Rows, report_columns, state_columns
from lmdeploy_focus.kernels.reference_settle import settle

from lmdeploy_focus.engine.stopping import FocusStoppingCriteria
from lmdeploy_focus.stages.state import first_rows

EOS, MASK_TOKEN, LENGTH, HISTORY = 7, 99, 8, 64


def _step(blocks, caps, starts, stop_words=None, history=HISTORY):
    """One step of blocks that decides nothing but what it is given: the report's columns, and the state's.

    Each block is its tokens, MASK_TOKEN where one is undecided. The last decided position was decided just now.
    """
    ids = torch.tensor(blocks)
    count = len(ids)
    decided = torch.where(ids == MASK_TOKEN, -1, torch.arange(LENGTH)).amax(1)
    masked = (ids == MASK_TOKEN) | (torch.arange(LENGTH) == decided[:, None])
    one = torch.ones(count, dtype=torch.int64)
    table = first_rows(ids.masked_fill(masked, MASK_TOKEN), masked, one * history, torch.tensor(caps),
                       torch.tensor(starts), one, 1.5, .8)
    rows, plan = (kind.empty(count, LENGTH, count * LENGTH, 'cpu') for kind in (Rows, Plan))
    rows.current.fill_(255)
    plan.current.copy_(torch.where(decided >= 0, 1 << decided.clamp_min(0), 128))
    plan.rightmost.copy_(decided)
    plan.sampled_start[1:] = (decided >= 0).long().cumsum(0)
    tokens = ids.gather(1, decided[:, None].clamp_min(0))[decided >= 0, 0]
    words = torch.tensor(stop_words or [[EOS, -1]] * count)
    report = settle(table, rows, plan, Pace.unlimited('cpu'), tokens, torch.ones(len(tokens)), words, MASK_TOKEN,
                    LENGTH)
    return report_columns(report, LENGTH), state_columns(table, LENGTH)


def _tokens(eos=None):
    return [EOS if p == eos else 10 + p for p in range(LENGTH)]


def test_the_first_of_cap_and_eos_wins():
    """Every pair in one block. Red with stock's rule, where the cap's position wins over an earlier EOS."""
    cases = [(eos, cap) for eos in range(LENGTH) for cap in range(1, LENGTH + 1)]
    report, state = _step([_tokens(eos) for eos, _ in cases], [cap for _, cap in cases], [HISTORY] * len(cases))
    assert report.stopped.all() and not state.alive.any()
    assert report.stop_pos.tolist() == [min(eos, cap - 1) for eos, cap in cases]


def test_stop_words_of_the_prompt_do_not_count():
    """Every split of a block between prompt and output. Red when the output's start is taken from the padded prompt."""
    cases = [(prompt, eos) for prompt in range(LENGTH) for eos in range(LENGTH)]
    report, state = _step([_tokens(eos) for _, eos in cases], [100] * len(cases),
                          [HISTORY + prompt for prompt, _ in cases])
    assert report.stopped.tolist() == [eos >= prompt for prompt, eos in cases]
    assert report.stop_pos.tolist() == [eos if eos >= prompt else LENGTH - 1 for prompt, eos in cases]
    assert state.alive.tolist() == [not stopped for stopped in report.stopped.tolist()]


def test_a_stop_waits_for_what_may_precede_it():
    """Every stop word and cap beside every undecided position. Red when a sequence ends while an undecided position
    before its end might hold a stop word, or runs on for positions that nobody will read."""
    cases = [(eos, waits, cap) for eos in range(LENGTH) for waits in range(LENGTH) for cap in (3, LENGTH, 100)
             if waits != eos]
    blocks = [[MASK_TOKEN if p == waits else token for p, token in enumerate(_tokens(eos))] for eos, waits, _ in cases]
    report, state = _step(blocks, [cap for *_, cap in cases], [HISTORY] * len(cases))
    for row, (eos, waits, cap) in enumerate(cases):
        end = min(eos, cap - 1)
        assert report.stopped[row] == (waits > end), (eos, waits, cap)
        assert report.stop_pos[row] == (end if waits > end else LENGTH - 1)
        assert report.masked[row] == (0 if waits > end else 1 << waits)
        assert state.alive[row] == (waits <= end) and (waits > end or state.history[row] == HISTORY)


def test_undecided_positions_are_no_stop_words():
    """Red when the mask token, as a stop word, ends a sequence where nothing is decided yet."""
    report, state = _step([[10, MASK_TOKEN, 12, 13, 14, 15, 16, 17]], [100], [HISTORY], [[MASK_TOKEN, -1]])
    assert not report.stopped.any() and state.alive.all()


def test_the_cap_counts_down_by_whole_blocks():
    """Red when the remainder of tokens is lost between blocks, or a block that the cap fills is not the last."""
    report, state = _step([_tokens()] * 4, [20, 12, 9, 8], [HISTORY] * 4)
    assert report.stopped.tolist() == [0, 0, 0, 1] and report.stop_pos.tolist() == [7] * 4
    assert state.appendable[:3].tolist() == [12, 4, 1]


def test_rows_are_independent():
    """Red when one row's stop words, cap or start is used for another."""
    blocks = [[1, EOS, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9, 8], [1, EOS, 2, 3, 4, 5, 6, 9],
              [1, EOS, 9, 3, 4, 5, 6, 8]]
    report, _ = _step(blocks, [100, 3, 100, 100], [64, 64, 70, 64], [[EOS, -1], [EOS, -1], [9, 8], [-1, -1]])
    assert report.stopped.tolist() == [1, 1, 1, 0]
    assert report.stop_pos.tolist() == [1, 2, 7, 7]


def test_a_prefill_ends_only_what_may_not_be_answered():
    """A prefill decodes nothing. Red when a stop word of the prompt ends a request, when one without room for a token
    goes on, or criteria go with another request."""
    criteria = FocusStoppingCriteria(torch.tensor([100, 0, -2, 1]), torch.tensor([64, 65, 66, 67]))
    stopped, stop_pos, after = criteria.step(torch.full((4 * LENGTH,), EOS), torch.tensor([[EOS]]))
    assert stopped.tolist() == [False, True, True, False]
    assert stop_pos.tolist() == [7, 7, 5, 7]
    kept = after.update(type('Delta', (), {'indices': torch.tensor([3, 0])}))
    assert kept.num_appendable_ids.tolist() == [1, 100] and kept.output_start_pos.tolist() == [67, 64]


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


@pytest.mark.parametrize('limit', [1, 31, 32, 33, 64])
def test_an_answer_ends_at_its_cap(pipelines, decode, demo_items, limit):
    """Red when a request gets a token too few or too many, or others than without the cap."""
    pipe = pipelines(dtype='float32')
    prompts = [item.prompt for item in demo_items[:8]]
    free = decode(pipe, prompts, ignore_eos=True, max_new_tokens=64)
    assert decode(pipe, prompts, ignore_eos=True, max_new_tokens=limit) == [tokens[:limit] for tokens in free]
