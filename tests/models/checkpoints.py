"""Small random checkpoints in the published layout of LLaDA2, SDAR-MoE and SDAR, with the demo model's tokenizer."""
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parents[2] / 'eval/demo_models/sdar'
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja')
VOCABULARY, MASK, STOP_IDS = 4096, 3, (2, 0)

_COMMON = {'vocab_size': VOCABULARY, 'hidden_size': 64, 'intermediate_size': 96, 'moe_intermediate_size': 32,
           'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 32,
           'hidden_act': 'silu', 'max_position_embeddings': 1024, 'rms_norm_eps': 1e-6, 'rope_theta': 10000.0,
           'rope_scaling': None, 'tie_word_embeddings': False, 'use_sliding_window': False, 'sliding_window': 4096,
           'pad_token_id': 0, 'torch_dtype': 'bfloat16', 'norm_topk_prob': True}
# As LLaDA2.0's config.json: no mask id and no block length, which the tokenizer and the family tell.
LLADA2 = _COMMON | {
    'model_type': 'llada2_moe', 'architectures': ['LLaDA2MoeModelLM'],
    'auto_map': {'AutoConfig': 'configuration_llada2_moe.LLaDA2MoeConfig',
                 'AutoModelForCausalLM': 'modeling_llada2_moe.LLaDA2MoeModelLM'},
    'num_experts': 16, 'num_experts_per_tok': 4, 'n_group': 4, 'topk_group': 2, 'num_shared_experts': 1,
    'first_k_dense_replace': 1, 'routed_scaling_factor': 2.5, 'score_function': 'sigmoid',
    'moe_router_enable_expert_bias': True, 'router_dtype': 'fp32', 'partial_rotary_factor': 0.5, 'use_qk_norm': True,
    'use_qkv_bias': False, 'use_bias': False, 'output_router_logits': False}
SDAR_MOE = _COMMON | {
    'model_type': 'sdar_moe', 'architectures': ['SDARMoeForCausalLM'],
    'auto_map': {'AutoConfig': 'configuration_sdar_moe.SDARMoeConfig',
                 'AutoModelForCausalLM': 'modeling_sdar_moe.SDARMoeForCausalLM'},
    'num_experts': 8, 'num_experts_per_tok': 3, 'decoder_sparse_step': 1, 'mlp_only_layers': [2],
    'attention_bias': False, 'router_aux_loss_coef': 0.001, 'block_size': 32, 'mask_token_id': MASK}
SDAR = _COMMON | {
    'model_type': 'sdar', 'architectures': ['SDARForCausalLM'],
    'auto_map': {'AutoConfig': 'configuration_sdar.SDARConfig',
                 'AutoModelForCausalLM': 'modeling_sdar.SDARForCausalLM'},
    'attention_bias': False, 'block_size': 32, 'mask_token_id': MASK}
CONFIGS = {'llada2': LLADA2, 'sdar_moe': SDAR_MOE}  # those with experts
MODELS = CONFIGS | {'sdar': SDAR}


def weights(name, seed=0, **changes):
    """Published tensor name -> random bf16 tensor (the experts' bias fp32); `changes` of the config."""
    config = MODELS[name] | changes
    generator = torch.Generator().manual_seed(seed)
    hidden, size = config['hidden_size'], config['head_dim']
    heads, kv_heads = config['num_attention_heads'], config['num_key_value_heads']
    made = {}

    def matrix(key, rows, columns, scale=1.0):
        made[key] = (torch.randn(rows, columns, generator=generator) * scale * columns**-0.5).bfloat16()

    def norm(key, width):
        made[key] = (1 + 0.2 * torch.randn(width, generator=generator)).bfloat16()

    def mlp(key, inner):
        matrix(f'{key}.gate_proj.weight', inner, hidden)
        matrix(f'{key}.up_proj.weight', inner, hidden)
        matrix(f'{key}.down_proj.weight', hidden, inner)

    llada2 = name == 'llada2'
    matrix(f'model.{"word_embeddings" if llada2 else "embed_tokens"}.weight', VOCABULARY, hidden, 4)
    for layer in range(config['num_hidden_layers']):
        prefix = f'model.layers.{layer}'
        norm(f'{prefix}.input_layernorm.weight', hidden)
        norm(f'{prefix}.post_attention_layernorm.weight', hidden)
        if llada2:
            matrix(f'{prefix}.attention.query_key_value.weight', (heads + 2 * kv_heads) * size, hidden)
            matrix(f'{prefix}.attention.dense.weight', hidden, heads * size)
            norm(f'{prefix}.attention.query_layernorm.weight', size)
            norm(f'{prefix}.attention.key_layernorm.weight', size)
        else:
            for part, count in (('q', heads), ('k', kv_heads), ('v', kv_heads)):
                matrix(f'{prefix}.self_attn.{part}_proj.weight', count * size, hidden)
            matrix(f'{prefix}.self_attn.o_proj.weight', hidden, heads * size)
            norm(f'{prefix}.self_attn.q_norm.weight', size)
            norm(f'{prefix}.self_attn.k_norm.weight', size)
        dense = name == 'sdar' or layer in config.get('mlp_only_layers', ())
        if dense or layer < config.get('first_k_dense_replace', 0):
            mlp(f'{prefix}.mlp', config['intermediate_size'])
            continue
        matrix(f'{prefix}.mlp.gate.weight', config['num_experts'], hidden)
        if llada2:
            # Some experts' scores with bias are negative, others' not.
            bias = torch.randn(config['num_experts'], generator=generator) * 0.3 - 0.6
            made[f'{prefix}.mlp.gate.expert_bias'] = bias
            mlp(f'{prefix}.mlp.shared_experts', config['moe_intermediate_size'] * config['num_shared_experts'])
        for expert in range(config['num_experts']):
            mlp(f'{prefix}.mlp.experts.{expert}', config['moe_intermediate_size'])
    norm('model.norm.weight', hidden)
    matrix('lm_head.weight', VOCABULARY, hidden, 5)
    return made


def write(folder, name, tensors=None, **changes):
    """A checkpoint in two files; `changes` of config.json, where 'absent' takes a field away."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = {key: value for key, value in (MODELS[name] | changes).items() if value != 'absent'}
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': list(STOP_IDS), 'pad_token_id': 0}))
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, folder)
    tensors = weights(name) if tensors is None else tensors
    names = sorted(tensors)
    parts = {'model-00001-of-00002.safetensors': names[::2], 'model-00002-of-00002.safetensors': names[1::2]}
    for file, part in parts.items():
        save_file({key: tensors[key] for key in part}, folder / file, metadata={'format': 'pt'})
    index = {key: file for file, part in parts.items() for key in part}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': index}))
    return folder
