"""The reference decode against identities that hold whatever the model is, in fp32."""
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from eval.demo_models.decode_options import DecodeOptions
from eval.demo_models.network import rope_table
from eval.demo_models.reference_decode import BlockDecode, Forced, decode
from eval.demo_models.tokenizer import MASK

from .. import oracle

MAX_NEW = 33


def texts(answers):
    return [answer.tokens for answer in answers]


@pytest.fixture(scope='module')
def dense(sdar, prompts):
    return decode(sdar, prompts, DecodeOptions(max_new=MAX_NEW))


@pytest.fixture(scope='module')
def delayed(sdar, prompts):
    return decode(sdar, prompts, DecodeOptions(mode='delayed', max_new=MAX_NEW))


@pytest.fixture(scope='module')
def focus(sdar, prompts):
    records = []
    answers = decode(sdar, prompts, DecodeOptions(mode='focus', threshold=0.8, max_new=MAX_NEW), records.append)
    return answers, records


def decode_without_cache(model, prompt, threshold, max_new, stop_ids, length=32):
    """Dense block diffusion, every step over the whole text: no cache, no batch, no commit."""
    text = list(prompt)
    text += [MASK] * (-len(text) % length)
    while len(text) - len(prompt) < max_new + length:
        if MASK not in text[-length:]:
            written = text[max(len(prompt), len(text) - length):]
            if any(token in stop_ids for token in written) or len(text) - len(prompt) >= max_new:
                break
            text += [MASK] * length
        ids = torch.tensor([text])
        block = torch.arange(len(text)) // length
        cos, sin = rope_table(len(text), model.shape.head_size, model.shape.rope_theta, 'cpu')
        mask = (block[:, None] >= block)[None, None]
        with torch.no_grad():
            hidden, _ = model.trunk(ids, cos[None], sin[None], 'dense', mask, torch.float32)
            logits = model.logits(hidden[0, -length:])
        logits[:, MASK] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        masked = [index for index in range(length) if text[index - length] == MASK]
        best = max(masked, key=lambda index: confidence[index])
        for index in masked:
            if index == best or confidence[index] >= threshold:
                text[index - length] = int(token[index])
    answer = text[len(prompt):len(prompt) + max_new]
    stops = [index for index, token in enumerate(answer) if token in stop_ids]
    return answer[:stops[0]] if stops else answer


@pytest.mark.parametrize('row', [1, 5, 6])
def test_dense_decoding_needs_no_cache(sdar, prompts, dense, row):
    """Red when prefill, the cache, a commit or a position is wrong: without any of them the text is the same."""
    options = DecodeOptions()
    expected = decode_without_cache(sdar, prompts[row], options.threshold, MAX_NEW, options.stop_ids)
    assert dense[row].tokens == expected


def test_focus_that_keeps_everything_is_the_delayed_cache(sdar, prompts, delayed):
    """Red when eviction's path differs by more than what it leaves out (architecture, decision 3)."""
    assert decode(sdar, prompts, DecodeOptions(mode='focus', keep=32, max_new=MAX_NEW)) == delayed


def test_a_delayed_cache_that_freezes_nothing_is_dense(sdar, prompts, dense):
    """Red when modes differ by anything but the processed set and what it sees."""
    assert decode(sdar, prompts, DecodeOptions(mode='delayed', cache='off', max_new=MAX_NEW)) == dense


def test_denoising_a_partial_block_in_prefill_is_the_first_dense_step(sdar, prompts, dense):
    """Red when prefill sees other keys than the step would, counts its tokens, or touches a full block."""
    later = decode(sdar, prompts, DecodeOptions(partial_block='decode', max_new=MAX_NEW))
    assert texts(later) == texts(dense)
    for prompt, first, second in zip(prompts, dense, later, strict=True):
        partial = int(len(prompt) % 32 > 0)
        assert second.counters.steps - first.counters.steps == partial
        assert (first.counters.prefill_decoded > 0) == partial
        assert second.counters.prefill_decoded == 0
        total = first.counters.decoded_tokens + first.counters.prefill_decoded
        assert total == second.counters.decoded_tokens


def test_progress_and_budget_after_a_partial_block(sdar, prompts):
    """Red when prefill's denoising leaves progress at -1, freezes positions or feeds the budget."""
    run = BlockDecode(sdar, prompts, DecodeOptions(mode='focus', max_new=MAX_NEW))
    partial = torch.tensor([len(prompt) % 32 > 0 for prompt in prompts])
    assert torch.equal(run.state.progress, torch.where(partial, 31, -1))
    assert run.state.uncached.all()
    assert not run.state.decoded.any() and not run.state.steps.any()
    assert torch.equal(run.prefill_record['unmasked'].any(1), partial)


@pytest.mark.parametrize('options', [
    DecodeOptions(mode='focus', threshold=0.8), DecodeOptions(mode='delayed', kv_visible='reference', commit='full')])
def test_company_changes_nothing(sdar, prompts, options):
    """Red when a sequence reads or writes what belongs to another."""
    options = replace(options, max_new=8)
    together = decode(sdar, prompts, options)
    for row in (1, 4, 6):
        assert decode(sdar, [prompts[row]], options) == [together[row]]


def test_the_last_commit_and_the_limit_change_no_token(sdar, prompts, focus):
    """Red when a limit reaches into the decoding, or the last commit does more than cost."""
    answers, _ = focus
    options = DecodeOptions(mode='focus', threshold=0.8, max_new=MAX_NEW)
    short = decode(sdar, prompts, replace(options, final_commit=False))
    assert texts(short) == texts(answers)
    for without, with_commit in zip(short, answers, strict=True):
        assert without.counters.commit_steps == with_commit.counters.commit_steps - 1
        assert without.counters.decoded_tokens == with_commit.counters.decoded_tokens
        assert (without.counters.suffix_rows - without.counters.commit_rows
                == with_commit.counters.suffix_rows - with_commit.counters.commit_rows)
    assert texts(decode(sdar, prompts, replace(options, max_new=5))) == [answer.tokens[:5] for answer in answers]


def test_every_step_follows_the_oracle(focus, prompts):
    """Red when a position is frozen too early or too late, when the budget counts another block's tokens or prefill's,
    or when progress, the visible keys or the counters are not those of the steps."""
    answers, records = focus
    blocks = [oracle.Block(32, progress=31 if len(prompt) % 32 else -1) for prompt in prompts]
    rows = [0] * len(prompts)
    for record in records[1:]:
        step = {name: value.tolist() for name, value in record.items()}
        for index, row in enumerate(step['row']):
            block, masked, kept = blocks[row], step['masked'][index], step['kept'][index]
            mask = [oracle.MASKED if is_masked else oracle.UNMASKED for is_masked in masked]
            positions = [position for position in range(32) if step['processed'][index][position]]
            assert positions == block.entering(mask)
            assert step['budget'][index] == oracle.budget(sum(masked), block.decoded, block.steps, Fraction('1.5'))
            assert step['progress'][index] == block.progress
            rightmost = max(position for position in range(32) if kept[position])
            history = step['history'][index]
            assert step['visible'][index] == oracle.visible(history, rightmost, block.progress, 'progress')
            assert step['visible_prefix'][index] == oracle.visible(history, positions[-1], block.progress, 'progress')
            after = [oracle.UNMASKED if new else old for old, new in zip(mask, step['unmasked'][index], strict=True)]
            block.advance(mask, after, rightmost)
            rows[row] += sum(kept)
            if step['committing'][index]:
                blocks[row] = oracle.Block(32)
    assert [answer.counters.suffix_rows for answer in answers] == rows


def test_every_step_keeps_the_rules(focus):
    """Red when a query attends to KV that was never computed, when a token is unmasked that was not processed, or when
    eviction drops a decoded token or more than it may."""
    answers, records = focus
    for record in records[1:]:
        masked, processed, kept = record['masked'], record['processed'], record['kept']
        assert not (masked & ~processed).any()
        assert torch.equal(kept, kept & processed)
        assert torch.equal(processed & ~masked, kept & ~masked)
        assert not (record['unmasked'] & ~(kept & masked)).any()
        assert (record['unmasked'].any(1) | record['committing']).all()
        assert ((kept & masked).sum(1) >= record['budget']).all()
        position = torch.arange(32)
        seen = position < (record['visible'] - record['history'])[:, None]
        assert not (seen & ~kept & (position > record['progress'][:, None])).any()
        assert not (kept & ~seen).any()
    assert sum(answer.counters.evicting_steps for answer in answers) > 0


def test_forced_decisions_are_followed(sdar, prompts, focus):
    """Red when a step ignores what it is told: its own decisions, forced, give its own text; others give theirs."""
    answers, records = focus
    options = DecodeOptions(mode='focus', threshold=0.8, max_new=MAX_NEW)
    run = BlockDecode(sdar, prompts, options)
    for record in records[1:]:
        run.step(Forced(record['kept'], record['unmasked'], record['argmax']))
    assert not run.running and run.results() == answers

    run = BlockDecode(sdar, prompts[:1], options)
    ids = torch.full_like(run.state.ids, 77)
    run.step(Forced(run.state.masked, run.state.masked, ids))
    written = run.prefill_record['masked'] & ~run.prefill_record['unmasked']
    record = run.step()
    assert record['committing'].all() and (record['uncached'] | ~written).all()
    assert torch.equal(record['ids'] == 77, written)


def test_bf16_runs(sdar, prompts, demo_folder):
    """Red when a step mixes dtypes."""
    from eval.demo_models.checkpoint import load_decoder
    model = load_decoder(demo_folder / 'sdar', dtype=torch.bfloat16)
    for answer in decode(model, prompts[:2], DecodeOptions(mode='focus', threshold=0.8, max_new=8)):
        assert answer.stopped or len(answer.tokens) == 8


@pytest.mark.parametrize(('name', 'value'), [
    ('mode', 'sparse'), ('selection', 'best'), ('cache', 'on'), ('kv_visible', 'all'), ('commit', 'none'),
    ('partial_block', 'skip'), ('threshold', 0.0), ('threshold', 1.1), ('threshold', float('nan')), ('alpha', 0.9),
    ('alpha', float('nan')), ('alpha', float('inf')), ('keep', 0), ('block_length', 0), ('max_new', 0)])
def test_bad_options_are_named(name, value):
    """Red when a bound is dropped or the message does not say which option it is."""
    with pytest.raises(ValueError, match=f'{name}='):
        DecodeOptions(**{name: value})


def test_empty_prompts_are_refused(sdar):
    """Red when an empty batch or prompt reaches the model."""
    for prompts in ([], [[]], [[5], []]):
        with pytest.raises(ValueError, match='prompts'):
            BlockDecode(sdar, prompts, DecodeOptions())
