"""Targets of other architectures than the demo's, with random weights and a random drafter."""
import json

import pytest
import torch

LAYERS = [0, 2]
PROMPTS = ['The', 'Tom has 3 apples and buys 5 more. How many apples does he have?',
           'Anna reads 12 pages a day. ' * 8 + 'How many pages does she read in 4 days?']
SIZES = {'vocab_size': 4096, 'hidden_size': 64, 'num_hidden_layers': 4, 'num_attention_heads': 4,
         'num_key_value_heads': 2, 'intermediate_size': 96, 'initializer_range': 0.2, 'eos_token_id': 2,
         'dtype': 'float32'}
# Architecture -> the HF config's class and what it has beside SIZES.
TARGETS = {
    'Qwen2ForCausalLM': ('Qwen2Config', {'tie_word_embeddings': True}),
    'LlamaForCausalLM': ('LlamaConfig', {'tie_word_embeddings': False, 'head_dim': 16}),
    'Qwen3MoeForCausalLM': ('Qwen3MoeConfig', {'head_dim': 16, 'moe_intermediate_size': 48, 'num_experts': 6,
                                               'num_experts_per_tok': 2, 'norm_topk_prob': True}),
}


@pytest.fixture
def random_pair(tmp_path, demo):
    """Returns a function: architecture -> folders of a target and of a drafter for it."""
    import transformers

    def write(architecture):
        from eval.demo_models.checkpoint import save_draft
        from eval.demo_models.network import Draft, Shape
        torch.manual_seed(1)
        config_class, fields = TARGETS[architecture]
        config = getattr(transformers, config_class)(**SIZES, **fields)
        getattr(transformers, architecture)(config).save_pretrained(tmp_path / 'target')
        transformers.AutoTokenizer.from_pretrained(demo / 'ar').save_pretrained(tmp_path / 'target')
        shape = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, intermediate=96)
        save_draft(Draft(shape, LAYERS, 8), tmp_path / 'draft', target_layers=4)
        return tmp_path / 'target', tmp_path / 'draft'

    return write


@pytest.mark.parametrize('architecture', TARGETS)
def test_tokens_and_features(architecture, random_pair, start, answer):
    """Red when verification changes what the target answers, or the features are of another layer, before the residual
    was added, or of another token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    target, draft = random_pair(architecture)
    with start(target, None) as plain:
        expected = answer(plain, PROMPTS, max_new_tokens=24)
    with start(target, draft) as pipe:
        agent = pipe.async_engine.engine.executor.model_agent
        assert [type(agent.patched_model.get_model()).__name__] == [f'DFlash{architecture}']
        proposer, seen = agent.spec_agent.proposer, []
        store = proposer._materialize_context
        proposer._materialize_context = lambda inputs, features, cache: (seen.append(features.clone()),
                                                                         store(inputs, features, cache))
        answer(pipe, PROMPTS[1:2], max_new_tokens=1)
        features = seen[0]
        proposer._materialize_context = store
        assert answer(pipe, PROMPTS, max_new_tokens=24) == expected
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(target).encode(PROMPTS[1])])
    with torch.inference_mode():
        hidden = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([hidden[layer + 1][0] for layer in LAYERS], -1), rtol=1e-4,
                               atol=1e-4)


def test_registering_changes_nothing_without_dflash(random_pair, start):
    """Red when a target without a drafter is built from a class of ours."""
    target, _ = random_pair('Qwen2ForCausalLM')
    with start(target, None) as pipe:
        model = pipe.async_engine.engine.executor.model_agent.patched_model.get_model()
        assert type(model).__module__ == 'lmdeploy.pytorch.models.qwen2'


def test_a_plain_engine_beside_one_with_a_drafter(pipes):
    """Red when a part of DFlash's is put into an engine that has none."""
    from lmdeploy.pytorch.spec_decode.base import BaseSpecModelAgent
    from lmdeploy.pytorch.strategies.ar import ARStrategyFactory
    plain, dflash = (pipe.async_engine.engine.executor.model_agent for pipe in pipes())
    assert type(plain.spec_agent) is BaseSpecModelAgent
    assert type(plain.strategy_factory) is ARStrategyFactory
    assert type(dflash.spec_agent).__name__ == 'DFlashSpecModelAgent'
    # Qwen3 hands its hidden states out itself.
    assert type(dflash.patched_model.get_model()).__module__ == 'lmdeploy.pytorch.models.qwen3'


def test_drafter_of_another_target_says_so(random_pair, start, demo):
    """Red when depth, hidden size or vocabulary of another target is not noticed before the engine starts."""
    target, _ = random_pair('LlamaForCausalLM')
    with pytest.raises(ValueError, match='num_target_layers of .*dflash is 8.*num_hidden_layers.*4'):
        start(target, demo / 'dflash')
    config = json.loads((target / 'config.json').read_text())
    (target / 'config.json').write_text(json.dumps(config | {'architectures': ['MistralForCausalLM']}))
    with pytest.raises(ValueError, match='--dflash .*MistralForCausalLM'):
        start(target, demo / 'dflash')
