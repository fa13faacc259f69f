"""LLaDA2, SDAR-MoE and SDAR in slow, plain torch, from their description (focus_semantics.md, section 5), in fp32.

Every expert runs on every token, and each token's experts are chosen in Python. The interface is that of
`eval.demo_models.network.Decoder`, so that the project's reference decode runs these models too. Letters: T tokens, C
hidden size, H heads, G key heads, D head size.
"""
from types import SimpleNamespace

import torch
import torch.nn.functional as F


def rms_norm(weight, eps=1e-6):
    return lambda x: weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotary_table(positions, rotary, theta):
    """Cosines and sines [positions, rotary]; both halves written out."""
    angles = torch.outer(torch.arange(positions).float(), theta**(-torch.arange(0, rotary, 2).float() / rotary))
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """The first dimensions of each head [..., T, H, D] by halves, as many as the tables have; the rest passes."""
    turned, rest = x[..., :cos.shape[-1]], x[..., cos.shape[-1]:]
    low, high = turned.chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def swiglu(weights, prefix):
    gate, up, down = (weights[f'{prefix}.{name}_proj.weight'] for name in ('gate', 'up', 'down'))
    return lambda x: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def llada2_route(scores, bias, config):
    """Expert -> weight of one token, from its sigmoid scores."""
    experts = list(range(config['num_experts']))
    width = config['num_experts'] // config['n_group']
    biased = (scores + bias).tolist()
    groups = [experts[start:start + width] for start in range(0, len(experts), width)]
    groups.sort(key=lambda group: sum(sorted((biased[expert] for expert in group), reverse=True)[:2]), reverse=True)
    allowed = [expert for group in groups[:config['topk_group']] for expert in group]
    chosen = sorted(allowed, key=lambda expert: biased[expert], reverse=True)[:config['num_experts_per_tok']]
    total = sum(scores[expert].item() for expert in chosen) + 1e-20
    return {expert: scores[expert].item() / total * config['routed_scaling_factor'] for expert in chosen}


def sdar_route(scores, config):
    """Expert -> weight of one token, from its softmax scores."""
    values = scores.tolist()
    chosen = sorted(range(len(values)), key=lambda expert: values[expert], reverse=True)
    chosen = chosen[:config['num_experts_per_tok']]
    total = sum(values[expert] for expert in chosen) if config['norm_topk_prob'] else 1.0
    return {expert: values[expert] / total for expert in chosen}


class Experts:
    """Routed experts and LLaDA2's shared one. `routes` has the choice of every token seen so far."""

    def __init__(self, weights, prefix, config):
        self.config, self.gate = config, weights[f'{prefix}.gate.weight']
        self.bias = weights.get(f'{prefix}.gate.expert_bias')
        self.experts = [swiglu(weights, f'{prefix}.experts.{expert}') for expert in range(config['num_experts'])]
        self.shared = swiglu(weights, f'{prefix}.shared_experts') if self.bias is not None else None
        self.routes = []

    def __call__(self, x):
        rows = x.flatten(0, -2)
        logits = rows @ self.gate.T
        if self.bias is None:
            routes = [sdar_route(row, self.config) for row in logits.softmax(-1)]
        else:
            routes = [llada2_route(row, self.bias, self.config) for row in logits.sigmoid()]
        self.routes += routes
        share = torch.zeros(len(rows), len(self.experts))
        for row, route in enumerate(routes):
            for expert, weight in route.items():
                share[row, expert] = weight
        out = sum(share[:, expert, None] * self.experts[expert](rows) for expert in range(len(self.experts)))
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.view_as(x)


class Attention:
    """Projections of one layer."""

    def __init__(self, weights, prefix, config, llada2):
        self.size = config['head_dim']
        heads, kv_heads = config['num_attention_heads'], config['num_key_value_heads']
        if llada2:
            fused = weights[f'{prefix}.attention.query_key_value.weight']
            parts = fused.split([heads * self.size, kv_heads * self.size, kv_heads * self.size])
            norms, out = ('attention.query_layernorm', 'attention.key_layernorm'), 'attention.dense'
        else:
            parts = [weights[f'{prefix}.self_attn.{part}_proj.weight'] for part in 'qkv']
            norms, out = ('self_attn.q_norm', 'self_attn.k_norm'), 'self_attn.o_proj'
        self.parts, self.out = parts, weights[f'{prefix}.{out}.weight']
        self.query_norm, self.key_norm = (rms_norm(weights[f'{prefix}.{norm}.weight']) for norm in norms)

    def _heads(self, x, part):
        return F.linear(x, self.parts[part]).unflatten(-1, (-1, self.size))

    def query(self, x, cos, sin):
        return rotate(self.query_norm(self._heads(x, 0)), cos, sin)

    def key_value(self, x, cos, sin):
        return rotate(self.key_norm(self._heads(x, 1)), cos, sin), self._heads(x, 2)

    def output(self, attended):
        return F.linear(attended.flatten(-2), self.out)


class Layer:

    def __init__(self, weights, prefix, config, llada2):
        self.self_attn = Attention(weights, prefix, config, llada2)
        self.input_layernorm = rms_norm(weights[f'{prefix}.input_layernorm.weight'])
        self.post_attention_layernorm = rms_norm(weights[f'{prefix}.post_attention_layernorm.weight'])
        dense = f'{prefix}.mlp.gate.weight' not in weights
        self.mlp = swiglu(weights, f'{prefix}.mlp') if dense else Experts(weights, f'{prefix}.mlp', config)

    def finish(self, x, attended):
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Oracle:
    """The model of tensors under their published names; `last_logits` are those of the last call."""

    def __init__(self, weights, config):
        weights = {name: weight.float() for name, weight in weights.items()}
        llada2 = config['model_type'] == 'llada2_moe'
        self.config, self.device, self.dtype = config, torch.device('cpu'), torch.float32
        self.rotary = int(config['head_dim'] * config.get('partial_rotary_factor', 1))
        self.shape = SimpleNamespace(head_size=config['head_dim'], kv_heads=config['num_key_value_heads'],
                                     rope_theta=config['rope_theta'])
        self.embedding = weights[f'model.{"word_embeddings" if llada2 else "embed_tokens"}.weight']
        self.layers = [Layer(weights, f'model.layers.{index}', config, llada2)
                       for index in range(config['num_hidden_layers'])]
        self.norm, self.head = rms_norm(weights['model.norm.weight']), weights['lm_head.weight']
        self.last_logits = None

    def embed(self, ids, dtype):
        assert dtype == torch.float32
        return self.embedding[ids]

    def logits(self, x):
        self.last_logits = F.linear(x, self.head)
        return self.last_logits.clone()

    def routes(self):
        """Those of every layer with experts, which begin anew."""
        found = []
        for layer in self.layers:
            if isinstance(layer.mlp, Experts):
                found.append(layer.mlp.routes)
                layer.mlp.routes = []
        return found

    def forward(self, ids, block_length):
        """Logits [T, vocabulary] of one text: a token sees its own block and all before it."""
        cos, sin = rotary_table(len(ids), self.rotary, self.config['rope_theta'])
        block = torch.arange(len(ids)) // block_length
        hidden = block[:, None] < block
        x = self.embedding[torch.tensor(ids)]
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, cos, sin)
            key, value = layer.self_attn.key_value(normed, cos, sin)
            group = query.shape[1] // key.shape[1]
            attended = []
            for head in range(query.shape[1]):
                scores = query[:, head] @ key[:, head // group].T * key.shape[-1]**-0.5
                attended.append(scores.masked_fill(hidden, float('-inf')).softmax(-1) @ value[:, head // group])
            x = layer.finish(x, torch.stack(attended, 1))
        return F.linear(self.norm(x), self.head)
