"""The kernel that routes LLaDA2's tokens on a GPU, in the Triton interpreter, and compiled where there is a GPU."""
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_lmdeploys_routing_kernel(device):
    """Red when the kernel takes other groups or experts than the description at LLaDA2.0's sizes, negative scores
    included."""
    environment = os.environ | ({'TRITON_INTERPRET': '1'} if device == 'cpu' else {})
    done = subprocess.run([sys.executable, str(Path(__file__).with_name('routing_kernel.py')), device],
                          env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith('routed alike\n'), done.stderr
