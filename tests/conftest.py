"""What all tests share: the meaning of the `gpu` marker, and how many threads torch may take."""
import os
from functools import cache

import pytest

# Before torch is imported, here and in every process that a test starts. The test models are too small for more
# threads, and test files run side by side.
os.environ.setdefault('OMP_NUM_THREADS', '1')


@cache
def has_cuda() -> bool:
    import torch
    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker('gpu') and not has_cuda():
        pytest.skip('needs a CUDA GPU')
