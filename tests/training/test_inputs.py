"""Wrong input is refused before any work, with the option, its value and its bound; and what is chosen by default."""
import json
from types import SimpleNamespace

import pytest

from scripts import train_dflash
from scripts.dflash_training.plan import _unused_token, make_plan, rope_theta
from scripts.dflash_training.prompts import Encoder, Sample, hold_out, read_samples


def refuse(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        train_dflash.main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err.replace('\n', ' ')


@pytest.mark.parametrize('flag,value,bound', [
    ('--layers', '0', 'at least 1'), ('--layers', 'x', 'at least 1'), ('--block-size', '1', 'at least 2'),
    ('--block-size', '257', 'at most 256'), ('--steps', '0', 'at least 1'), ('--batch', '-1', 'at least 1'),
    ('--anchors', '0', 'at least 1'), ('--lr', '0', 'above 0'), ('--lr', 'nan', 'above 0'),
    ('--max-new-tokens', '1', 'at least 2'), ('--max-prompt-tokens', '0', 'at least 1'),
    ('--temperature', '-1', 'above 0'), ('--sampled-share', '1.5', 'from 0 to 1'), ('--held-out', '0', 'at least 1'),
    ('--target-layers', '3,1', 'ascending'), ('--target-layers', '1,', 'ascending'), ('--seed', '-1', 'at least 0'),
    ('--save-every', '0', 'at least 1'), ('--dtype', 'float16', 'bfloat16'), ('--resume', 'maybe', 'never'),
    ('--mask-token', '4096', 'at most 4095'), ('--mask-token', '2', 'none of the stop tokens'),
    ('--target-layers', '1,7', 'at most 6'), ('--layers', '7', '--target-layers must be given'),
    ('--max-new-tokens', '9999', 'at most the 4096 positions'), ('--device', 'tpu', 'auto, cpu, cuda'),
    ('--device', 'cuda:99', 'CUDA GPUs'), ('--compare', '/nowhere', '/nowhere'),
    ('--resume', 'always', 'must then hold'),
])
def test_options(demo, prompts, tmp_path, capsys, flag, value, bound):
    """Red when an option out of bounds is taken, or the message lacks its name, its value or the bound."""
    output = tmp_path / 'out'
    message = refuse(capsys, demo / 'ar', '--prompts', prompts, '--output', output, flag, value)
    assert bound in message and (value in message or flag in ('--layers', '--resume'))
    assert flag in message or flag == '--compare'
    assert not output.exists()


def test_files_and_folders(demo, prompts, tmp_path, capsys):
    """Red when a missing file, a missing target, a file as OUTPUT, a foreign OUTPUT or both sources are taken."""
    target, out = demo / 'ar', ('--output', tmp_path / 'out')
    assert 'neither is given' in refuse(capsys, target, *out)
    assert 'both are given' in refuse(capsys, target, *out, '--prompts', prompts, '--answers', prompts)
    assert "--prompts is '/nowhere'" in refuse(capsys, target, *out, '--prompts', '/nowhere')
    assert 'TARGET is' in refuse(capsys, tmp_path, *out, '--prompts', prompts)
    assert '--output is' in refuse(capsys, target, '--output', prompts, '--prompts', prompts)
    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    (foreign / 'config.json').write_text('{}')
    assert 'not of this command' in refuse(capsys, target, '--output', foreign, '--prompts', prompts)
    never = '--prompts', prompts, '--resume', 'never'
    assert 'must then be empty' in refuse(capsys, target, '--output', foreign, *never)
    assert (foreign / 'config.json').read_text() == '{}'


@pytest.mark.parametrize('line,bound', [
    ('{', 'a JSON object'), ('[1]', 'a JSON object'), ('{"text": "x"}', 'either prompt or messages'),
    ('{"prompt": "x", "messages": []}', 'either prompt or messages'), ('{"prompt": ""}', 'not empty'),
    ('{"prompt": 7}', 'not empty'), ('{"prompt": [4096]}', 'from 0 to 4095'), ('{"messages": [1]}', 'role and content'),
    ('{"prompt": "a"}', 'at least 2'),
])
def test_lines_of_prompts(facts, tmp_path, line, bound):
    """Red when a wrong line is taken or passed over, or the message does not say which one it is."""
    path = tmp_path / 'p.jsonl'
    path.write_text('{"prompt": "a"}\n\n' + line + '\n')
    with pytest.raises(ValueError, match=bound) as refused:
        read_samples(path, '--prompts', Encoder(facts[1], False, 4096), 99, None)
    assert f'--prompts {path}' in str(refused.value) and ('line 3' in str(refused.value) or bound == 'at least 2')


def test_prompts_of_each_form(facts, tmp_path):
    """Red when a text is not the text, messages are not in the chat template and ready to be answered, a text answer
    has no stop token, ids change, or long and repeated prompts stay."""
    tokenizer = facts[1]
    chat = tuple(tokenizer('<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')['input_ids'])
    plain = tuple(tokenizer('Hi')['input_ids'])
    text, lines = tmp_path / 'p.txt', tmp_path / 'p.jsonl'
    text.write_text('Hi\n\n Ho \nHi\n' + 'long ' * 50 + '\n')
    encoder = Encoder(tokenizer, False, 4096)
    assert [s.prompt for s in read_samples(text, '--prompts', encoder, 9, None)] == [plain, tuple(
        tokenizer('Ho')['input_ids'])]
    assert read_samples(text, '--prompts', Encoder(tokenizer, True, 4096), 99, None)[0].prompt == chat
    lines.write_text(json.dumps({'messages': [{'role': 'user', 'content': 'Hi'}], 'answer': 'Ho'}) + '\n'
                     + json.dumps({'prompt': [5, 6], 'answer': [7, 8]}) + '\n')
    samples = read_samples(lines, '--answers', encoder, 99, 2)
    assert samples == [Sample(chat, (*tokenizer('Ho')['input_ids'], 2)), Sample((5, 6), (7, 8))]


def test_answers_instead_of_prompts(demo, tmp_path, capsys):
    """Red when given answers are not trained on, or the mask token within one is taken."""
    path = tmp_path / 'a.jsonl'
    asked = [{'role': 'user', 'content': 'Solve for x: 3x + 4 = 19'}]
    rows = [{'messages': [*asked, *asked[:index]], 'answer': '7 8 9'} for index in range(2)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    command = [str(demo / 'ar'), '--answers', str(path), '--output', str(tmp_path / 'out'), '--layers', '1', '--steps',
               '1', '--batch', '2', '--max-new-tokens', '4', '--block-size', '4']
    assert train_dflash.main(command) == 0
    assert len((tmp_path / 'out' / 'answers.jsonl').read_text().splitlines()) == 1      # the held-out one
    two = '--output', tmp_path / 'two', '--mask-token', 1
    assert '--mask-token is 1, which occurs' in refuse(capsys, *command[:3], *two)


def test_held_out_prompts_are_not_trained_on():
    """Red when a prompt with two answers is in both parts, or the parts depend on anything but the seed."""
    samples = [Sample((index // 2, ), (index, )) for index in range(40)]
    training, held_out = hold_out(samples, 3, 0)
    assert len(held_out) == 3 and len(training) == 34 and hold_out(samples, 3, 0) == (training, held_out)
    assert not {sample.prompt for sample in training} & {sample.prompt for sample in held_out}
    assert hold_out(samples, 3, 1)[1] != held_out and len(hold_out(samples, 99, 0)[1]) == 4


def test_the_default_layers_and_mask(make, facts):
    """Red when the default spread is not LMDeploy's, or the tokenizer's own mask is not taken."""
    assert make(layers=3)[1].target_layers == (1, 3, 5) and make(layers=1)[1].target_layers == (4, )
    assert make()[1].mask_token == 3 and make(mask_token=9)[1].mask_token == 9
    options, plan = make()
    assert plan.stop_ids == (2, 0) and plan == make_plan(options, *facts)


def tokenizer_with(tokens, added=None, mask=None):
    return SimpleNamespace(get_vocab=lambda: {str(token): token for token in tokens}, added_tokens_decoder=added or {},
                           mask_token_id=mask, bos_token_id=0, pad_token_id=None, unk_token_id=None)


def test_the_mask_token_of_other_tokenizers():
    """Red when a token that text can have is chosen: with no unused one the option must be given."""
    assert _unused_token(tokenizer_with(range(8)), 10, (7, )) == 8
    added = {5: '<|fim|>', 6: '<|reserved_special_token_0|>', 7: '<|reserved_special_token_1|>'}
    assert _unused_token(tokenizer_with(range(8), added), 8, (6, )) == 7
    assert _unused_token(tokenizer_with(range(8), added, mask=4), 10, (6, )) == 4
    with pytest.raises(ValueError, match='--mask-token is not given'):
        _unused_token(tokenizer_with(range(8), {5: '<|fim|>'}), 8, (6, ))


@pytest.mark.parametrize('fields,theta', [
    ({'rope_theta': 5e5}, 5e5), ({'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default'}}, 1e6),
    ({'rope_parameters': {'full_attention': {'rope_theta': 2e6}, 'sliding_attention': {'rope_theta': 1e4}}}, 2e6),
    ({}, 1e4),
])
def test_the_base_of_the_rope(fields, theta):
    """Red when a generation of configs is read wrongly."""
    assert rope_theta(SimpleNamespace(**fields)) == theta
