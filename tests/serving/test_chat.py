"""`lmdeploy chat` with focus, as a user types it."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_chat_answers_and_leaves(tmp_path):
    """Red when the stock chat command does not take --focus, or does not answer."""
    command = [str(Path(sys.executable).with_name('lmdeploy')), 'chat', str(ROOT / 'eval' / 'demo_models' / 'sdar'),
               '--focus', '--device', 'cpu', '--max-batch-size', '2']
    done = subprocess.run(command, input='What is z when 2z - 5 = 3? Show your work.\n\nexit\n\n', capture_output=True,
                          text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '####' in done.stdout or '=' in done.stdout, done.stdout
    assert '<|MASK|>' not in done.stdout
