"""What the wrappers of our kernels ask of a tensor before its address is handed to a kernel."""
import torch
from torch import Tensor


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse anything but a contiguous tensor of this shape and data type.

    Raises:
        ValueError: with the argument's name, what it is and what it should be.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f'{name} is {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}: the kernel '
                         f'takes contiguous {tuple(shape)} of {dtype}')
