"""The checkpoints themselves: what others load them with, and what comes out."""
import json
import os

import pytest
import torch

from eval.demo_models.checkpoint import load_decoder, load_draft, save_draft, save_sdar
from eval.demo_models.reference_ar import decode_ar
from eval.demo_models.reference_dflash import decode_dflash
from eval.demo_models.tasks import eval_set
from eval.demo_models.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILES,
    VOCABULARY,
    chat_prompt,
    encode_prompts,
    load_tokenizer,
)

MODELS = ('sdar', 'ar', 'dflash')


def test_the_tree_stays_small(demo_folder):
    """Red when something large is added: a clone has to stay quick."""
    files = [path for path in demo_folder.rglob('*') if path.is_file() and '__pycache__' not in path.parts]
    size = sum(path.stat().st_size for path in files)
    assert size < 37e6


@pytest.mark.parametrize('model', MODELS)
def test_every_model_has_a_card(demo_folder, model):
    """Red when a card loses its licence, or says nothing about what the model does not prove."""
    card = (demo_folder / model / 'README.md').read_text()
    front, body = card.split('---\n')[1:]
    assert 'license: apache-2.0' in front
    for said in ('training', 'Scores', 'What it proves, and what not'):
        assert said in body


@pytest.mark.parametrize('model', MODELS)
def test_chat_ids_are_the_chat_template_s(demo_folder, model, monkeypatch):
    """Red when the template in the checkpoint and `encode_prompts` part, or a model's tokenizer is another."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    from transformers import AutoTokenizer
    loaded = AutoTokenizer.from_pretrained(demo_folder / model)
    prompts = [item.prompt for item in eval_set(None, 2)] + ['', ' two\nlines ', 'the text <|MASK|> and <|im_end|>']
    ours = encode_prompts(load_tokenizer(demo_folder / model), prompts)
    for prompt, ids in zip(prompts, ours, strict=True):
        message = [{'role': 'user', 'content': prompt}]
        assert loaded.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == chat_prompt(prompt)
        assert loaded.apply_chat_template(message, add_generation_prompt=True)['input_ids'] == ids
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert len(loaded) == VOCABULARY


def test_the_tokenizers_are_one(demo_folder):
    """Red when one folder's tokenizer is changed alone."""
    for name in TOKENIZER_FILES:
        assert len({(demo_folder / model / name).read_bytes() for model in MODELS}) == 1


def test_sdar_is_plain_data(demo_folder):
    """Red when remote code comes back, or the block length or the mask token leaves the config."""
    config = json.loads((demo_folder / 'sdar' / 'config.json').read_text())
    assert 'auto_map' not in config and not list((demo_folder / 'sdar').glob('*.py'))
    assert (config['block_size'], config['mask_token_id'], config['model_type']) == (32, 3, 'sdar')


def test_what_is_saved_is_loaded_again(demo_folder, tmp_path):
    """Red when export drops a weight or a field of the config that a reader needs."""
    decoder, draft = load_decoder(demo_folder / 'sdar'), load_draft(demo_folder / 'dflash')
    save_sdar(decoder, tmp_path / 'sdar')
    save_draft(draft, tmp_path / 'dflash', 8)
    for model in ('sdar', 'dflash'):
        path = tmp_path / model
        for name in ('config.json', 'model.safetensors'):
            assert (path / name).read_bytes() == (demo_folder / model / name).read_bytes()
        assert os.stat(path / 'model.safetensors').st_mode & 0o444 == 0o444


def test_speculation_changes_no_token(demo_folder, prompts):
    """Red when verification accepts a wrong token, or the drafter writes into the target's cache."""
    model, draft = load_decoder(demo_folder / 'ar'), load_draft(demo_folder / 'dflash')
    expected = decode_ar(model, prompts, 32)
    drafted = decode_dflash(model, draft, prompts, 32)
    assert [(answer.tokens, answer.stopped) for answer in drafted] == expected
    # Real questions only: the drafter knows their answers, not those of the cut ones.
    assert sum(answer.verified for answer in drafted[:4]) > 3 * sum(answer.steps for answer in drafted[:4])


def test_the_models_answer(demo_folder, tokenizer, sdar):
    """Red when weights, tokenizer and template do not belong together: random text gets none of 8 right."""
    from eval.demo_models.reference_decode import DecodeOptions, decode
    items = eval_set(None, 2)
    prompts = encode_prompts(tokenizer, [item.prompt for item in items])
    answers = decode(sdar, prompts, DecodeOptions(mode='focus', threshold=0.8, max_new=160))
    right = [item.check(tokenizer.decode(answer.tokens)) for item, answer in zip(items, answers, strict=True)]
    assert sum(right) >= 4
    assert torch.isfinite(sdar.norm.weight).all()
