"""Targets of other families, tiny and random: plan, features, answers and a step."""
import pytest
import torch

from scripts.dflash_training.layout import check_plan, new_draft
from scripts.dflash_training.options import Options
from scripts.dflash_training.plan import make_plan
from scripts.dflash_training.prompts import Sample
from scripts.dflash_training.target import Target
from scripts.dflash_training.trainer import Trainer

_SIZES = {'hidden_size': 32, 'num_hidden_layers': 5, 'num_attention_heads': 4, 'num_key_value_heads': 2,
          'head_dim': 8, 'intermediate_size': 48, 'max_position_embeddings': 128}


@pytest.mark.parametrize('family,changes,dtype', [
    ('llama', {'tie_word_embeddings': False, 'attention_bias': True}, torch.float32),
    ('qwen2', {}, torch.bfloat16),
    ('gpt2', {'n_embd': 32, 'n_layer': 5, 'n_head': 4, 'n_positions': 128}, torch.float32),
    ('gemma3_text', {'sliding_window': 16}, torch.float32),
    ('qwen3_moe', {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16}, torch.float32),
])
def test_a_target_of_another_family(facts, tmp_path, family, changes, dtype):
    """Red when something is taken for granted that only the demo target has: names of sizes, an untied head, a scaled
    embedding, the place of the decoder, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    sizes = {} if family == 'gpt2' else _SIZES
    config = AutoConfig.for_model(family, vocab_size=4096, eos_token_id=2, pad_token_id=0, **sizes, **changes)
    options = Options(target=family, output=tmp_path, layers=2, block_size=4, steps=2, batch=2, anchors=3,
                      max_prompt_tokens=32, max_new_tokens=32)
    plan = make_plan(options, config, facts[1], facts[2])
    check_plan(plan, family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target = Target(model, plan)
    answers = target.answer([(5, 6, 7), (8, 9)], 6, None, 0)
    with torch.no_grad():
        whole = model(torch.tensor([[5, 6, 7, *answers[0]]])).logits[0, 2:-1].argmax(-1)
    if dtype == torch.float32:
        assert tuple(whole.tolist()) == answers[0]
    samples = [Sample((5, 6, 7), (11, 12, 13, 14, 2)), Sample((8, 9), (21, 22, 23))]
    trainer = Trainer(target, new_draft(plan), samples, samples[:1], options)
    losses = [trainer.train_step()[0].loss for _ in range(2)]
    assert all(torch.isfinite(loss) for loss in losses) and trainer.measure() >= 1
    logits = target.logits(model.base_model(torch.tensor([[5, 6, 7]]))[0])
    torch.testing.assert_close(logits.argmax(-1), model(torch.tensor([[5, 6, 7]])).logits.argmax(-1))
