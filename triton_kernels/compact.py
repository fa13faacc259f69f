"""The rows of a step that stay, of several tensors in one launch; twin: `reference_compact`."""
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ['compact']

_BLOCK = 2048
_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _compact_kernel(source, count, tensors, outs, strides, WIDTHS: tl.constexpr, FIRSTS: tl.constexpr,
                    COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """One program for a row and a chunk of it; the chunks of a tensor are those from its entry of FIRSTS on."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    real = row >= 0
    if COUNTED:
        real = row < tl.load(count)
    at = tl.load(source + row, mask=real, other=0).to(tl.int64)
    for index in tl.static_range(len(WIDTHS)):
        begin = (chunk - FIRSTS[index]) * BLOCK
        if (begin >= 0) & (begin < WIDTHS[index]):
            column = begin + tl.arange(0, BLOCK)
            # a row that is none is not read: its source may be anything
            values = tl.load(tensors[index] + at * strides[index] + column, mask=(column < WIDTHS[index]) & real,
                             other=0)
            tl.store(outs[index] + row * WIDTHS[index] + column, values, mask=column < WIDTHS[index])


def compact(source: Tensor, count: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some rows of several tensors, in the order of `source`: what stays of a step's batch.

    Args:
        source: [N] int64 or int32, row to take from each tensor.
        count: [1] int64 or int32, how many of `source` are real: the result is 0 beyond them, and `source` may hold
            anything there. None for all.
        tensors: [T, ...] each, of any data type; the values of a row lie side by side, rows may have any distance.

    Returns:
        [N, ...] of each tensor, contiguous.

    Raises:
        ValueError: arguments that the kernel cannot take.
    """
    if source.ndim != 1 or source.dtype not in _INTEGERS or not source.is_contiguous():
        raise ValueError(f'source {tuple(source.shape)} of {source.dtype}: compact takes contiguous int32 or int64')
    if count is not None and (count.numel() != 1 or count.dtype not in _INTEGERS):
        raise ValueError(f'count {tuple(count.shape)} of {count.dtype}: compact takes one int32 or int64')
    if not tensors:
        raise ValueError('no tensors: compact takes at least one')
    for tensor in tensors:
        if not tensor.ndim or (tensor.size(0) and not tensor[0].is_contiguous()):
            raise ValueError(f'a tensor {tuple(tensor.shape)} with strides {tensor.stride()}: compact takes rows whose '
                             'values lie side by side')
    outs = tuple(torch.empty((source.numel(), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
                 for tensor in tensors)
    widths = [tensor[0].numel() if tensor.size(0) else 0 for tensor in tensors]
    firsts = [sum(triton.cdiv(width, _BLOCK) for width in widths[:index]) for index in range(len(widths) + 1)]
    if source.numel() and firsts[-1]:
        _compact_kernel[(source.numel(), firsts[-1])](
            source, count, tensors, outs, tuple(tensor.stride(0) for tensor in tensors), WIDTHS=tuple(widths),
            FIRSTS=tuple(firsts), COUNTED=count is not None, BLOCK=_BLOCK, num_warps=4)
    return outs
