"""A pipeline in a notebook: Jupyter runs cells inside an event loop of its own."""
from pathlib import Path

CELLS = ["""
import asyncio
asyncio.get_running_loop()  # raises unless the cell runs in an event loop, as in every notebook
from lmdeploy import GenerationConfig, pipeline
from lmdeploy_focus import FocusEngineConfig, run_stats
pipe = pipeline(MODEL, backend_config=FocusEngineConfig(device_type='cpu', max_batch_size=4), log_level='ERROR')
""", """
answer = pipe('What is z when 2z - 5 = 3? Show your work.', gen_config=GenerationConfig(max_new_tokens=64))
assert len(answer.token_ids) > 10 and answer.finish_reason in ('stop', 'length')
stats = run_stats(pipe)
assert stats['steps'] > 0 and stats['suffix_rows'] < stats['prefix_rows'], stats
""", """
pipe.close()
pipe = pipeline(MODEL, backend_config=FocusEngineConfig(device_type='cpu', max_batch_size=4), log_level='ERROR')
assert pipe('Put the words in alphabetical order: b, a.').token_ids
pipe.close()
"""]


def test_cells_run(tmp_path):
    """Build, ask, read the counters, close and build again. Red when any of it blocks or fails in a running loop."""
    import nbformat
    from nbclient import NotebookClient
    model = str(Path(__file__).parents[2] / 'eval' / 'demo_models' / 'sdar')
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.replace('MODEL', repr(model)).strip())
                                               for cell in CELLS])
    resources = {'metadata': {'path': str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name='python3', resources=resources).execute()
    assert all(cell.execution_count for cell in notebook.cells)
