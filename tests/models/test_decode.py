"""The engine's LLaDA2, SDAR-MoE and SDAR against plain-torch oracles, in fp32: logits, routing, and whole decodes."""
import itertools

import pytest
import torch

from lmdeploy_focus.config import BLOCK_LENGTHS

from .checkpoints import CONFIGS, MASK, MODELS, STOP_IDS
from .conftest import model_of
from .oracles import Experts, llada2_route, rotary_table

LONG = 'Anna reads 12 pages a day. ' * 5
PROMPTS = ('The quick brown fox', 'Tom has 3 apples and buys 5 more. How many apples does he have? ' * 2)
THRESHOLD, MAX_NEW = 0.6, 12
LOGITS, TIE = 2e-4, 1e-5  # logits are up to 30; five times the measured difference
FOCUS = {'mode': 'focus', 'partial_block': 'decode'}
DECODES = {
    'stock': ({'focus': False}, {'mode': 'base'}),
    'delayed': ({'focus_policy': 'never'}, {'mode': 'delayed', 'partial_block': 'decode'}),
    'focus': ({'focus_policy': 'always'}, FOCUS),
}


@pytest.mark.parametrize('name', MODELS)
def test_logits_and_routing_of_a_full_forward(name, engine, decode, oracles):
    """A prefill of several blocks: all logits, and every token's experts in every layer.

    Red when a weight lands elsewhere, RoPE turns other dimensions, a score, group, bias or scaling of the router is
    another, or the shared expert or a dense layer is not where it belongs.
    """
    pipe, oracle = engine(name, focus=False, dllm_block_length=32), oracles[name]
    model, prefills, routes = model_of(pipe), [], []
    routers = [module for path, module in model.named_modules() if path.endswith(('mlp.gate.choose', 'softmax_topk'))]

    def take(_, args, kwargs, hidden):
        prefills.append((kwargs['input_ids'][0].tolist(), model.get_logits(hidden)[0]))

    hooks = [model.register_forward_hook(take, with_kwargs=True)]
    hooks += [router.register_forward_hook(lambda _, args, out: routes.append(out)) for router in routers]
    decode(pipe, [LONG], max_new_tokens=1)
    for hook in hooks:
        hook.remove()
    ids, logits = prefills[0]
    assert len(ids) >= 64
    oracle.routes()
    expected = oracle.forward(ids, 32)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS)
    layers = oracle.routes()
    assert len(layers) == len(routers) == (3 if name in CONFIGS else 0)
    for (weights, chosen), layer in zip(routes, layers, strict=False):
        assert len(chosen) == len(layer) == len(ids)
        if name == 'sdar_moe':  # LMDeploy's experts divide by the sum
            weights = weights / weights.sum(-1, keepdim=True)
        for row, route in enumerate(layer):
            assert set(chosen[row].tolist()) == set(route)
            torch.testing.assert_close(weights[row], torch.tensor([route[expert] for expert in chosen[row].tolist()]),
                                       rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('bias', [-3.0, -0.6, 0.5])
def test_routing_where_scores_are_negative(bias, engine):
    """Red when an expert of another group, whose score LMDeploy sets to 0, passes before a negative one."""
    model, config = model_of(engine('llada2', focus=False, dllm_block_length=32)), CONFIGS['llada2']
    router = model.model.layers[1].mlp.gate
    generator = torch.Generator().manual_seed(1)
    kept = router.expert_bias.detach().clone()
    given = torch.randn(config['num_experts'], generator=generator) * 0.2 + bias
    hidden = torch.randn(200, config['hidden_size'], generator=generator)
    with torch.inference_mode():
        router.expert_bias.copy_(given)
        for _ in range(2):  # weights may be sent again
            router.update_weights()
            weights, chosen = router(hidden)
            scores = (hidden @ router.weight.T).sigmoid()
            for row in range(len(hidden)):
                route = llada2_route(scores[row], given, config)
                assert set(chosen[row].tolist()) == set(route)
                assert weights[row].tolist() == pytest.approx([route[expert] for expert in chosen[row].tolist()], 1e-4)
        router.expert_bias.copy_(kept)


class Reference:
    """The reference decode of one prompt, with its logits."""

    def __init__(self, oracle, ids, length, options):
        from eval.demo_models import reference_decode
        wanted = reference_decode.DecodeOptions(threshold=THRESHOLD, max_new=MAX_NEW, block_length=length,
                                                final_commit=False, early_stop=options['mode'] != 'base', **options)
        run = reference_decode.BlockDecode(oracle, [ids], wanted)
        self.steps, self.near_tie, self.evicting = [], False, False
        if run.prefill_record is not None:
            self._take(run.prefill_record, oracle)
        while run.running:
            record = run.step()
            if options['mode'] == 'base' or not record['committing'][0]:
                self._take(record, oracle)
        self.tokens = run.results()[0].tokens

    def _take(self, record, oracle):
        candidates = (record['masked'] & record['kept'])[0]
        self.evicting |= bool((record['masked'] & ~record['kept']).any())
        self.steps.append((candidates.nonzero()[:, 0].tolist(), oracle.last_logits[0].clone()))
        confidence = record['confidence'][0][candidates]
        if not len(confidence):
            return
        best = confidence.topk(min(2, len(confidence))).values
        clear = (confidence - THRESHOLD).abs().min() > TIE and (best[0] >= THRESHOLD or best[0] - best[-1] > TIE
                                                                 or len(best) == 1)
        delta = record['delta'][0][record['masked'][0]].sort(descending=True).values if 'budget' in record else []
        if len(delta) > record.get('budget', 0):
            budget = int(record['budget'])
            rest, cut = delta[budget:], delta.mean() + delta.std(correction=0)
            clear = clear and delta[budget - 1] - rest[0] > TIE and (rest - cut).abs().min() > TIE
        self.near_tie |= not clear


@pytest.fixture
def engine_steps(monkeypatch):
    """Returns a function: pipeline -> a list that its steps come to, each (block positions, logits [R, V])."""
    from lmdeploy_focus.stages import unmask
    hooks = []

    def watch(pipe, focus, length):
        steps = []
        if focus:
            original = unmask.logits

            def logits(model, view, hidden, rows):
                out = original(model, view, hidden, rows)
                if len(out):
                    steps.append((view.plan.sampled_position[rows].tolist(), out.clone()))
                return out

            monkeypatch.setattr(unmask, 'logits', logits)
        else:
            model = model_of(pipe)

            def take(_, args, kwargs, hidden):
                steps.append((list(range(length)), model.get_logits(hidden[:, -length:])[0]))

            hooks.append(model.register_forward_hook(take, with_kwargs=True))
        return steps

    yield watch
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('kind, length', [*itertools.product(('stock', 'focus'), BLOCK_LENGTHS), ('delayed', 4),
                                          ('delayed', 32)])
def test_logits_and_tokens_of_a_decode(name, kind, length, engine, decode, oracles, engine_steps, monkeypatch):
    """Every step's logits and every token of prompts of one to several blocks; then the same prompts in one batch.

    Red when a position, a visible key, the rotated part of a head, the kept rows, or what a layer after the seam
    computes of them is not the paper's; or when the experts of a row depend on its company.
    """
    from eval.demo_models import reference_decode
    options, reference = DECODES[kind]
    pipe, oracle = engine(name, dllm_block_length=length, dllm_confidence_threshold=THRESHOLD, **options), oracles[name]
    # a part of a head is rotated: the table is narrower than the reference's models have it
    monkeypatch.setattr(reference_decode, 'rope_table', lambda positions, size, theta, device: rotary_table(
        positions, oracle.rotary, theta))
    steps = engine_steps(pipe, kind != 'stock', length)
    answers, evicting = {}, False
    for prompt in PROMPTS:
        ids = pipe.async_engine.tokenizer.encode(prompt)
        wanted = Reference(oracle, ids, length, reference)
        steps.clear()
        answer = decode(pipe, [prompt], max_new_tokens=MAX_NEW)[0]
        if wanted.near_tie:
            continue
        if kind == 'stock':  # it reads over a stop word in the prompt's own block (fault B3) and runs one step more
            answer = answer[:len(wanted.tokens)]
            expected = [(list(range(length)), logits) for _, logits in wanted.steps]
            if not len(ids) % length:
                expected.insert(0, steps[0])  # a full last block is not denoised in prefill
        else:
            expected = [(places, logits[places]) for places, logits in wanted.steps]
            assert len(steps) == len(expected)
        assert answer == wanted.tokens
        for (places, logits), (positions, right) in zip(steps, expected, strict=False):
            assert places == positions
            torch.testing.assert_close(logits, right, rtol=0, atol=LOGITS)
        evicting |= wanted.evicting
        answers[prompt] = answer
    assert answers, 'all prompts have near-ties'
    assert evicting == (kind == 'focus')
    together = decode(pipe, list(answers), max_new_tokens=MAX_NEW)
    assert [answer[:len(answers[prompt])] for prompt, answer in zip(answers, together, strict=True)] == list(
        answers.values())


@pytest.mark.parametrize('name, stock, ours', [
    ('llada2', 'lmdeploy_focus.models.llada2.LLaDA2MoeModelLM', 'lmdeploy_focus.models.llada2.FocusLLaDA2MoeModelLM'),
    ('sdar_moe', 'lmdeploy.pytorch.models.sdar_moe.SDARMoeForCausalLM',
     'lmdeploy_focus.models.sdar_moe.FocusSDARMoeForCausalLM'),
    ('sdar', 'lmdeploy.pytorch.models.sdar.SDARForCausalLM', 'lmdeploy_focus.models.sdar.FocusSDARForCausalLM')])
def test_focus_off_is_lmdeploys_block_diffusion(name, stock, ours, engine):
    """Red when a step, a strategy or a model of ours other than LLaDA2 runs with focus off, or a stock one with it."""
    for options, expected, parts in (({'focus': False}, stock, 'lmdeploy.pytorch.strategies.dllm'),
                                     ({'focus_policy': 'always'}, ours, 'lmdeploy_focus.engine')):
        pipe = engine(name, dllm_block_length=32, dllm_confidence_threshold=THRESHOLD, **options)
        kind = type(model_of(pipe))
        assert f'{kind.__module__}.{kind.__name__}' == expected
        agent = pipe.async_engine.engine.executor.model_agent
        assert type(agent.strategy_factory).__module__.startswith(parts)
        assert any(base.__module__.startswith('lmdeploy_focus.engine') for base in type(agent).__mro__) is bool(
            'focus_policy' in options)


def test_the_oracle_has_experts_and_dense_layers(oracles):
    """Red when the checkpoints no longer have what the tests above are for."""
    kinds = {name: [isinstance(layer.mlp, Experts) for layer in oracle.layers] for name, oracle in oracles.items()}
    assert kinds == {'llada2': [False, True, True, True], 'sdar_moe': [True, True, False, True], 'sdar': [False] * 4}
    assert oracles['llada2'].rotary == 16 and oracles['sdar_moe'].rotary == oracles['sdar'].rotary == 32
    assert MASK not in STOP_IDS
