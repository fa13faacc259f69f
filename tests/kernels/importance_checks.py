"""What must hold for the Triton importance, interpreted or compiled; run as a program it checks the small shapes."""
import pytest
import torch
from lmdeploy_focus.kernels import reference
from lmdeploy_focus.kernels.importance import importance, importance_partial
from torch import Tensor

# S, L, query heads of a key head, key heads, D
SMALL = [(3, 4, 1, 2, 64), (1, 16, 8, 1, 16), (5, 32, 3, 2, 64), (3, 64, 4, 1, 128), (3, 7, 5, 1, 32)]
LARGE = [(1, 4, 8, 2, 64), (3, 16, 1, 8, 128), (17, 32, 4, 8, 128), (256, 32, 4, 8, 128), (128, 64, 8, 4, 64),
         (33, 64, 5, 2, 128), (7, 23, 7, 3, 32), (40, 8, 6, 1, 256)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Strided query and key, and candidates between rows that are not masked; the first three blocks have L, 1 and 0
    masked tokens."""
    sequences, length, groups, kv_heads, size = shape
    random = torch.Generator().manual_seed(seed + sum(shape))
    masked = [length, 1, 0, *torch.randint(0, length + 1, (sequences,), generator=random).tolist()][:sequences]
    packed = torch.randn(sequences * length, (groups + 1) * kv_heads + 1, size, generator=random).to(dtype).to(device)
    candidates = torch.full((sequences, length), -1)
    for s, count in enumerate(masked):
        candidates[s, :count] = s * length + torch.randperm(length, generator=random)[:count].sort().values
    heads = groups * kv_heads
    return packed[:, :heads], packed[:, heads:heads + kv_heads], candidates.to(device)


def check_twin(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The values of the twin, and of the twin on one key head at a time."""
    query, key, candidates = make(shape, dtype, device)
    groups, scale = shape[2], shape[4]**-0.5
    torch.testing.assert_close(importance(query, key, candidates, scale),
                               reference.importance(query, key, candidates, scale),
                               rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    out = torch.full((shape[0], shape[3], shape[1]), float('nan'), device=device)
    assert importance_partial(query, key, candidates, scale, out) is out
    for h in range(shape[3]):
        expected = reference.importance(query[:, h * groups:(h + 1) * groups], key[:, h:h + 1], candidates, scale)
        torch.testing.assert_close(out[:, h], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_company(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The same bits alone, in company and in another order; NaN and huge numbers stay where they are."""
    query, key, candidates = make(shape, dtype, device, seed=1)
    together = importance(query, key, candidates, 1.0)
    assert importance(query, key, candidates.flip(0), 1.0).flip(0).equal(together)
    alone = torch.cat([importance(query, key, own[None], 1.0) for own in candidates[:20]])
    assert alone.equal(together[:20])
    query, key = query.clone(), key.clone()
    together = importance(query, key, candidates, 1.0)
    query[:shape[1]] = key[:shape[1]] = float('nan')
    assert importance(query, key, candidates, 1.0)[1:].equal(together[1:])
    total = importance(together.new_full((), 100.) * query.float(), 100. * key.float(), candidates, 1.0).sum(1)
    torch.testing.assert_close(total[1:], (candidates >= 0).sum(1)[1:] * float(query.size(1)), rtol=1e-5, atol=0)


def check_refusals(device: str) -> None:
    """Shapes that the kernel cannot take raise."""
    query, key, candidates = make((3, 4, 1, 2, 64), torch.float32, device)
    refused = [(query[..., :48], key[..., :48], candidates, 1.0), (query, key[..., :32], candidates, 1.0),
               (query, key.half(), candidates, 1.0), (query, key, candidates.int(), 1.0), (query, key, candidates, 0.0),
               (query, key, candidates.repeat(1, 17), 1.0), (query[:, :1], key, candidates, 1.0),
               (query, key, candidates, 1.0, torch.empty(3, 2, 5, device=device))]
    for arguments in refused:
        with pytest.raises(ValueError, match='importance'):
            importance_partial(*arguments)


def main() -> None:
    torch.set_num_threads(1)
    for shape in SMALL:
        check_twin(shape, torch.float32, 'cpu')
    check_twin(SMALL[2], torch.float16, 'cpu')  # the interpreter's dot takes the bits of bfloat16 for integers
    check_company(SMALL[2], torch.float32, 'cpu')
    check_refusals('cpu')
    assert importance(*make((3, 4, 1, 2, 64), torch.float32, 'cpu')[:2], torch.empty((0, 4), dtype=torch.int64),
                      1.0).shape == (0, 4)


if __name__ == '__main__':
    main()
