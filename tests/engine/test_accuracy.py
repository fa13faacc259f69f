"""Focus costs no answers and saves most rows on the demo model; its ranking is better than chance, and chance than its
reverse."""
import pytest
import torch

PROMPT_LIMIT = 288


@pytest.fixture(scope='module')
def run(pipelines, decode):
    """Returns a function: items a task, token limit, tasks, engine options -> right answers, rows per decoded token."""
    from eval.demo_models import tasks
    from lmdeploy_focus import activate, run_stats

    def chosen(pipe, per_task, kinds):
        tokenizer = pipe.async_engine.tokenizer.model.model

        def short(item):
            chat = [{'role': 'user', 'content': item.prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            return len(ids) <= PROMPT_LIMIT

        return [item for task in kinds
                for item in list(filter(short, tasks.eval_set(task, 2 * per_task)))[:per_task]]

    def evaluate(per_task, limit, kinds=tasks.TASKS, **options):
        # fp32 on a CPU: near-ties that bf16 decides one way or the other depend on the processor
        device = {'device_type': 'cpu', 'dtype': 'float32', 'num_gpu_blocks': 1024}
        if torch.cuda.is_available():
            device = {'device_type': 'cuda', 'max_batch_size': 256, 'num_gpu_blocks': 4096}
        activate()  # stock's steps are counted too
        pipe = pipelines(**device, **options)
        tokenizer, items = pipe.async_engine.tokenizer.model.model, chosen(pipe, per_task, kinds)
        before = run_stats(pipe)
        answers = decode(pipe, [item.prompt for item in items], max_new_tokens=limit)
        verdicts = tasks.score(items, [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers])
        spent = {name: value - before[name] for name, value in run_stats(pipe).items()}
        right = {task: sum(bool(v) for item, v in zip(items, verdicts, strict=True) if item.task == task)
                 for task in tasks.TASKS}
        print(options, right, sum(right.values()), spent,
              f'{spent["decoded_tokens"] / spent["steps"]:.2f} tokens a step, '
              f'{spent["suffix_rows"] / spent["decoded_tokens"]:.2f} rows per decoded token')
        return sum(right.values()), spent['suffix_rows'] / spent['decoded_tokens']

    return evaluate


def test_focus_keeps_the_answers(run):
    """Twenty questions a task. Red when eviction, freezing or unmasking harms what is decoded."""
    stock, stock_rows = run(20, 256, focus=False, dllm_confidence_threshold=0.9)
    focus, focus_rows = run(20, 256, dllm_confidence_threshold=0.8)
    assert focus >= stock - 4
    assert focus_rows < 0.45 * stock_rows


@pytest.mark.slow
def test_focus_keeps_the_answers_of_many(run):
    """Two hundred questions a task: at most one point lower on the four that have checkers, at most 0.35 of the rows.

    Rows are counted with the free texts, as in the models' published figures (4.3 against 15.2): short, formulaic
    answers alone decode half as fast again without focus, which leaves less to save.
    """
    from eval.demo_models.tasks import ALL_TASKS
    stock, stock_rows = run(200, 384, ALL_TASKS, focus=False, dllm_confidence_threshold=0.9)
    focus, focus_rows = run(200, 384, ALL_TASKS, dllm_confidence_threshold=0.8)
    assert focus >= stock - 8
    assert focus_rows <= 0.35 * stock_rows


@pytest.mark.parametrize('per_task', [10, pytest.param(60, marks=pytest.mark.slow)])
def test_the_ranking_counts(run, per_task):
    """Exactly four masked tokens kept, by three rankings. Red when importance no longer tells decodable tokens."""
    right = {ranking: run(per_task, 192, focus_keep=4, focus_selection=ranking, dllm_confidence_threshold=0.9)[0]
             for ranking in ('top', 'random', 'bottom')}
    assert right['top'] > right['random'] > right['bottom']
