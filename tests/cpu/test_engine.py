"""LMDeploy's engine on the CPU, from `lmdeploy.pipeline` to the text, with the demo models and focus off."""
import asyncio
from pathlib import Path

import pytest
import torch
from lmdeploy import GenerationConfig, pipeline

from lmdeploy_focus import FocusEngineConfig

DEMO_MODELS = Path(__file__).resolve().parents[2] / 'eval' / 'demo_models'
NEW_TOKENS = 48
# Lengths from one token to more than a page, so that a batch is as ragged as can be.
PROMPTS = [
    'The',
    'Tom has 3 apples and buys 5 more. How many apples does he have?',
    '<|im_start|>user\nSolve for x: 3x + 4 = 19<|im_end|>\n<|im_start|>assistant\n',
    '<|im_start|>user\nWrite a Python function that adds two numbers.<|im_end|>\n<|im_start|>assistant\n',
    'def add(a, b):\n    return',
    'Anna reads 12 pages a day. ' * 16 + 'How many pages does she read in 4 days?',
]
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False)


def build(model, **options):
    if model == 'sdar':
        options = {'dllm_block_length': 32, 'dllm_confidence_threshold': 0.9} | options
    # A small number of pages keeps the tests small; one test leaves it to the budget.
    config = {'dtype': 'float32', 'session_len': 1024, 'num_gpu_blocks': 64} | options
    return pipeline(str(DEMO_MODELS / model),
                    backend_config=FocusEngineConfig(focus=False, device_type='cpu', **config))


def answer(pipe, prompts=PROMPTS, gen_config=GREEDY):
    return [out.token_ids for out in pipe(list(prompts), gen_config=gen_config, do_preprocess=False)]


def agent_of(pipe):
    return pipe.async_engine.engine.executor.model_agent


@pytest.fixture(scope='module')
def ar_pipe():
    with build('ar') as pipe:
        yield pipe


def greedy_by_transformers(folder):
    """Greedy continuations by transformers' own model in fp32, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0, ids.size(1):].tolist()
        answers.append(out[:-1] if out[-1] == tokenizer.eos_token_id else out)
    return answers


@pytest.fixture(scope='module')
def greedy_reference():
    return greedy_by_transformers(DEMO_MODELS / 'ar')


def test_autoregressive_equals_transformers(ar_pipe, greedy_reference):
    """Red when attention, paging, rotary positions, weights, dtype or sampling differ from the plain model's."""
    assert answer(ar_pipe) == greedy_reference
    # One at a time: a batch of one takes other paths than a ragged one.
    assert [answer(ar_pipe, [prompt])[0] for prompt in PROMPTS[:3]] == greedy_reference[:3]


def test_experts_equal_transformers(tmp_path):
    """Red when routing, renormalising or the experts' weights differ from the plain model's: Qwen3-MoE with random
    weights, which is as sensitive as a trained one."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=4096, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=16, moe_intermediate_size=48, num_experts=6,
                            num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.2, eos_token_id=2,
                            dtype='float32')
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO_MODELS / 'ar').save_pretrained(tmp_path)
    reference = greedy_by_transformers(tmp_path)
    assert len({tuple(ids) for ids in reference}) == len(PROMPTS)
    with build(tmp_path) as pipe:
        assert answer(pipe) == reference


def test_float32_is_float32_throughout(ar_pipe):
    """Red when weights or the KV cache are of another dtype than asked for."""
    agent = agent_of(ar_pipe)
    assert {weight.dtype for weight in agent.patched_model.get_model().parameters()} == {torch.float32}
    assert {cache.dtype for layer in agent.cache_engine.gpu_cache for cache in layer} == {torch.float32}
    assert {weight.device.type for weight in agent.patched_model.get_model().parameters()} == {'cpu'}


def test_no_class_of_ours_but_the_device(ar_pipe):
    """Red when a CPU engine with focus off has another agent than LMDeploy's own, moved to the CPU."""
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

    from lmdeploy_focus.cpu.agent import CpuAgentMixin, cpu_agent_class
    assert type(agent_of(ar_pipe)) is cpu_agent_class(BaseModelAgent)
    assert type(agent_of(ar_pipe)).__mro__[1:3] == (CpuAgentMixin, BaseModelAgent)
    assert cpu_agent_class(BaseModelAgent) is cpu_agent_class(BaseModelAgent)


def test_sleep_and_wakeup(ar_pipe, greedy_reference):
    """Red when sleep loses the weights, wake-up moves them to a GPU, or the engine does not answer again."""
    engine = ar_pipe.async_engine.engine
    for level in (1, 2):
        ar_pipe._run(coro=engine.sleep(level)).result()
        assert agent_of(ar_pipe).cache_engine is None
        engine.wakeup()
        assert answer(ar_pipe, PROMPTS[:2]) == greedy_reference[:2]


def test_preempted_sequences_answer_the_same(greedy_reference):
    """Red when a sequence that lost its pages does not get its keys and values back.

    16 pages of 16 tokens hold all the short prompts, but not all their answers.
    """
    with build('ar', num_gpu_blocks=16, block_size=16, kernel_block_size=16, session_len=224) as pipe:
        scheduler = pipe.async_engine.engine.scheduler
        preempt, preempted = scheduler.preempt_seqs, []

        def count(seqs):
            seqs = list(seqs)
            preempted.extend(seqs)
            preempt(seqs)

        scheduler.preempt_seqs = count
        assert answer(pipe, PROMPTS[:-1]) == greedy_reference[:-1]
        assert preempted


def test_first_of_two_engines_closes_first(greedy_reference):
    """Red when an engine holds LMDeploy's process-wide device: the one that closes takes it from the other.

    This is what running a notebook's cell again does.
    """
    from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
    get_device_manager().set_context(DeviceContext())
    first = build('ar')
    assert answer(first, PROMPTS[:2]) == greedy_reference[:2]
    second = build('ar')
    assert answer(second, PROMPTS[:2]) == greedy_reference[:2]
    assert get_device_manager().current_context() == DeviceContext()
    first.close()
    assert answer(second, PROMPTS[:2]) == greedy_reference[:2]
    second.close()


def test_inside_a_running_loop(greedy_reference):
    """Red when the pipeline needs the thread's event loop, which in a notebook is running already."""

    async def cell():
        with build('ar') as pipe:
            at_once = answer(pipe, PROMPTS[:2])
            streamed = []
            for out in pipe.stream_infer(PROMPTS[1], gen_config=GREEDY, do_preprocess=False):
                streamed += out.token_ids
            return [*at_once, streamed]

    assert asyncio.run(cell()) == [*greedy_reference[:2], greedy_reference[1]]


def test_engine_in_a_process_of_its_own(greedy_reference):
    """Red when the config does not carry the extension into a spawned process, as the API server needs."""
    with build('ar', enable_mp_engine=True) as pipe:
        assert answer(pipe, PROMPTS[:2]) == greedy_reference[:2]


def test_block_diffusion_does_not_depend_on_pages_or_company():
    """Red when a block's rows see keys of another block, page or sequence.

    32 rows a block cross pages of 16; the whole is compared with pages of 64 and with prompts alone.
    """
    prompts, gen_config = PROMPTS[:4], GenerationConfig(max_new_tokens=32, do_sample=False)
    with build('sdar') as pipe:
        together = answer(pipe, prompts, gen_config)
        alone = [answer(pipe, [prompt], gen_config)[0] for prompt in prompts[:2]]
    with build('sdar', kernel_block_size=16) as pipe:
        small_pages = answer(pipe, prompts, gen_config)
    assert together == small_pages
    assert together[:2] == alone
    assert all(0 < len(ids) <= 32 for ids in together)


def test_defaults_without_options():
    """Red when a plain config needs an option or an environment variable, or `auto` is not the checkpoint's bf16."""
    with pipeline(str(DEMO_MODELS / 'ar'), backend_config=FocusEngineConfig(focus=False, device_type='cpu')) as pipe:
        config = pipe.async_engine.engine.engine_config
        assert config.enable_metrics and config.max_batch_size == 64
        # 16 sequences of the checkpoint's 4096 tokens, in blocks of 64.
        assert config.num_gpu_blocks == 16 * 65
        assert {weight.dtype for weight in agent_of(pipe).patched_model.get_model().parameters()} == {torch.bfloat16}
        sampled = pipe(PROMPTS[:2], gen_config=GenerationConfig(max_new_tokens=8, do_sample=True, temperature=1.0,
                                                                top_p=0.9, top_k=20, random_seed=1))
        assert all(0 < out.generate_token_len <= 8 for out in sampled)


def test_refusal_comes_before_the_model_is_loaded():
    """Red when a model is read first: the folder does not exist."""
    from lmdeploy.messages import QuantPolicy
    from lmdeploy.pytorch.engine import Engine
    config = FocusEngineConfig(focus=False, device_type='cpu')
    config.quant_policy = QuantPolicy.INT8
    with pytest.raises(ValueError, match="quant_policy must be 0.*device_type='cpu'"):
        Engine(str(DEMO_MODELS), engine_config=config)
