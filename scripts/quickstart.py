"""Serve the demo model with focus off, with the delayed cache alone and with focus, and ask each the same questions.

Every figure comes from the server's own metrics; every answer is judged by its task's checker.
"""
import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from eval.api_server import ApiServer  # noqa: E402
from eval.demo_models import tasks  # noqa: E402

MODEL = ROOT / 'eval' / 'demo_models' / 'sdar'
NAME = 'demo'
QUESTIONS = (('math', 0), ('math', 1), ('algebra', 0), ('code', 0), ('ifeval', 0))
# thresholds as in the paper's comparison: 0.9 where all masked tokens compete, 0.8 where only the likely ones do
MODES = {
    'focus off (stock)': ['--dllm-confidence-threshold', '0.9'],
    'delayed cache only': ['--focus', '--focus-policy', 'never', '--dllm-confidence-threshold', '0.9'],
    'focus': ['--focus'],
}


def questions() -> list[tasks.Item]:
    """Held-out items, the first of each task; training has not seen them."""
    return [tasks.eval_set(task, index + 1)[index] for task, index in QUESTIONS]


def ask(server: ApiServer, items: list[tasks.Item]) -> list[str]:
    """The answers to all items through the OpenAI client."""
    from openai import OpenAI
    with OpenAI(base_url=f'{server.url}/v1', api_key='none', timeout=300) as client:
        replies = [client.chat.completions.create(model=NAME, messages=[{'role': 'user', 'content': item.prompt}],
                                                  temperature=0, max_tokens=256) for item in items]
    return [reply.choices[0].message.content or '' for reply in replies]


def run_mode(flags: list[str], items: list[tasks.Item], console: Console, label: str) -> dict:
    """One server: its answers, what they cost, how many are right."""
    with console.status(f'{label}: starting the server') as status:

        def waiting(seconds: int) -> None:
            status.update(f'{label}: starting the server, {seconds} s')

        flags = ['--device', 'cpu', '--model-name', NAME, *flags]
        with ApiServer(MODEL, flags, waiting=waiting) as server:
            console.print(f'[dim]{label}: {" ".join(["lmdeploy", *server.command[1:]]).replace(f"{ROOT}/", "")}[/dim]',
                          soft_wrap=True)
            status.update(f'{label}: {len(items)} questions')
            answers = ask(server, items)
            counters = server.counters()
    tokens = max(1, counters['decoded_tokens'])
    return {
        'answers': answers,
        'right': [bool(verdict) for verdict in tasks.score(items, answers)],
        'counters': counters,
        'steps': counters['steps'],
        'tokens_per_step': round(counters['decoded_tokens'] / max(1, counters['steps']), 2),
        'rows_per_decoded_token': round(counters['suffix_rows'] / tokens, 2),
    }


def print_answers(console: Console, items: list[tasks.Item], result: dict) -> None:
    """Questions and answers with their verdicts."""
    for item, answer, right in zip(items, result['answers'], result['right'], strict=True):
        colour, verdict = ('green', 'right') if right else ('red', 'wrong')
        body = f'[bold]{_plain(item.prompt)}[/bold]\n\n{_plain(answer)}'
        console.print(Panel(body, title=item.task, subtitle=verdict, border_style=colour, title_align='left'))


def print_table(console: Console, results: dict[str, dict]) -> None:
    """The three modes side by side."""
    table = Table(title='The same five questions')
    for column in ('', 'steps', 'tokens a step', 'rows per decoded token', 'right answers'):
        table.add_column(column, justify='left' if not column else 'right')
    for label, result in results.items():
        table.add_row(label, str(result['steps']), f'{result["tokens_per_step"]:.2f}',
                      f'{result["rows_per_decoded_token"]:.2f}', f'{sum(result["right"])} of {len(result["right"])}')
    console.print(table)
    console.print('A row is one token of a block in the layers after the second: what decoding costs.')


def _plain(text: str) -> str:
    return text.replace('[', '\\[')


def main() -> None:
    """Run all modes and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--json', action='store_true', help='print one JSON object instead of text')
    arguments = parser.parse_args()
    progress = Console(stderr=True)
    items = questions()
    results = {label: run_mode(flags, items, progress, label) for label, flags in MODES.items()}
    if arguments.json:
        asked = [{'task': item.task, 'prompt': item.prompt} for item in items]
        print(json.dumps({'questions': asked, 'modes': results}, indent=1))
        return
    console = Console()
    print_answers(console, items, results['focus'])
    print_table(console, results)


if __name__ == '__main__':
    main()
