"""What must hold for the Triton compaction, interpreted or compiled; run as a program it checks small shapes."""
import pytest
import torch
from lmdeploy_focus.kernels import reference_compact as reference
from lmdeploy_focus.kernels.compact import compact
from torch import Tensor

# rows T, rows taken N, and those that are real
SMALL = [(9, 5, None), (9, 5, 3), (1, 1, 0), (4, 0, None), (3, 7, 7)]
LARGE = [(8192, 2048, 1500), (2048, 2048, None), (300, 7, 6)]


def make(rows: int, taken: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Source and tensors as a step has them: queries between other heads, a residual of more than a chunk, a layer's
    view of a wider table, and one value a row."""
    random = torch.Generator().manual_seed(seed + rows + taken)
    source = torch.randint(0, rows, (taken,), generator=random)
    wide = torch.randn(rows, 7, 64, generator=random).to(device, dtype)
    residual = torch.randn(rows, 4133, generator=random).to(device, dtype)
    tables = torch.randn(rows, 2, 48, generator=random).to(device)
    return source.to(device), [wide[:, 2:6], residual, tables[:, 1], torch.arange(rows, device=device)]


def check_twin(rows: int, taken: int, real: int | None, dtype: torch.dtype, device: str) -> None:
    """The bits of the twin; beyond the real rows the source may hold anything."""
    source, tensors = make(rows, taken, dtype, device)
    for integer in (torch.int64, torch.int32):
        own = source.to(integer)
        count = None if real is None else torch.tensor([real], dtype=integer, device=device)
        if real is not None:
            own[real:] = 2**31 - 1
        for number in range(1, len(tensors) + 1):
            result = compact(own, count, *tensors[:number])
            expected = reference.compact(own, count, *tensors[:number])
            assert len(result) == len(expected) == number
            for one, other in zip(result, expected, strict=True):
                assert one.equal(other) and one.dtype == other.dtype and one.is_contiguous()


def check_refusals(device: str) -> None:
    """Arguments that the kernel cannot take raise."""
    source, tensors = make(9, 5, torch.float32, device)
    count = torch.tensor([3], device=device)
    for refused in ((source.float(), count, *tensors), (source[None], count, *tensors), (source[::2], count, *tensors),
                    (source, count.float(), *tensors), (source, source, *tensors), (source, count),
                    (source, count, tensors[0].transpose(1, 2)), (source, count, tensors[1][:, ::2]),
                    (source, count, count[0])):
        with pytest.raises(ValueError, match='compact'):
            compact(*refused)


def main() -> None:
    torch.set_num_threads(1)
    for rows, taken, real in SMALL:
        check_twin(rows, taken, real, torch.float32, 'cpu')
    check_twin(*SMALL[1], torch.bfloat16, 'cpu')
    check_refusals('cpu')


if __name__ == '__main__':
    main()
