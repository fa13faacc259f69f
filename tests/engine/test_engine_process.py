"""The start of the engine's own process."""
from types import SimpleNamespace

import pytest

from lmdeploy_focus.engine.engine_process import start_engine_process


def test_an_engine_process_that_dies_is_reported():
    """Red when the parent waits for ever, or takes the engine for started."""
    # `print` knows none of the arguments that LMDeploy gives an engine process
    engine = SimpleNamespace(_mp_proc=print)
    with pytest.raises(RuntimeError, match='ended before it was ready, with exit code 1'):
        start_engine_process(engine, 'm', None, trust_remote_code=False)
