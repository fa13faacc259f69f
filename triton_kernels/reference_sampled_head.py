"""Twin of `sampled_head`: filtered and seeded sampling of each row and its confidence, in plain torch."""
import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ['sampled_head']

CANDIDATES = 64  # most tokens that a row may draw from
CHUNK = 128
_LOW = 0xFFFFFFFF
# Philox 4x32-10 (Salmon et al. 2011): multipliers, key increments, rounds
_FACTORS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# largest float32 whose product with 2**31 - 1 is below 1
_UNIT = 4.6566127342e-10


def uniform(seeds: Tensor, offsets: Tensor) -> Tensor:
    """Numbers in [0, 1) that are a function of seed and offset alone: `triton.language.rand`'s.

    Args:
        seeds: [R] int64, all 64 bits count.
        offsets: [R] int64, the low 32 bits count.

    Returns:
        [R] float32.
    """
    first, second, third, fourth = offsets & _LOW, *torch.zeros(3, dtype=torch.int64, device=offsets.device)
    keys = [seeds & _LOW, (seeds >> 32) & _LOW]
    for _ in range(_ROUNDS):
        # products wrap as unsigned ones do: all 64 bits are right, and the mask removes the sign that a shift drags in
        left, right = first * _FACTORS[0], third * _FACTORS[1]
        first, second = ((right >> 32) & _LOW) ^ second ^ keys[0], right & _LOW
        third, fourth = ((left >> 32) & _LOW) ^ fourth ^ keys[1], left & _LOW
        keys = [(key + increment) & _LOW for key, increment in zip(keys, _INCREMENTS, strict=True)]
    # negative numbers, as signed ones of 32 bits, are folded onto the others
    folded = torch.where(first > _LOW // 2, first ^ _LOW, first)
    return folded.float() * _UNIT


def _candidates(values: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens of the K largest of each row, [R, V] -> [R, K]; of equal ones the smaller token comes first."""
    rows, vocabulary = values.shape
    # a token outside the chunks with the largest maxima has at least as many ahead of it as there are such chunks
    chunks = pad(values, (0, -vocabulary % CHUNK), value=float('-inf')).view(rows, -(-vocabulary // CHUNK), CHUNK)
    best = chunks.amax(2).sort(dim=1, descending=True, stable=True).indices[:, :CANDIDATES].sort(dim=1).values
    gathered = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    ordered = gathered.sort(dim=1, descending=True, stable=True)
    columns = ordered.indices[:, :min(CANDIDATES, vocabulary)]
    return gathered.gather(1, columns), best.gather(1, columns // CHUNK) * CHUNK + columns % CHUNK


def _draw(values: Tensor, numbers: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Column drawn from [R, K] sorted logits, [R, 1] int64; all others [R, 1].

    As LMDeploy filters (`logits_process._filter_*_sorted_`), but with weights that are not normalised, in float64: what
    is compared is then the same on every device but for one case in 10**15.
    """
    weights = ((values - values[:, :1]) / temperature).exp()
    weights = weights.masked_fill(torch.arange(values.size(1), device=values.device) >= top_k, 0)
    ends = weights.cumsum(1)
    starts = torch.cat([torch.zeros_like(numbers), ends[:, :-1]], 1)
    dropped = (starts > top_p * ends[:, -1:]) | (weights < min_p * weights[:, :1])
    # what stays is a prefix, in which nothing moves
    total = ends.masked_fill(dropped, 0).amax(1, keepdim=True)
    # comparisons with NaN are false: a row that is not all numbers takes its first candidate, as the greedy head does
    return (~dropped & (ends < numbers * total)).sum(1, keepdim=True)


def sampled_head(logits: Tensor, mask_token: int, count: Tensor, sequence: Tensor, position: Tensor,
                 temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
                 random_offset: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Seeded sampling and confidence of R rows, by the parameters of each row's sequence.

    Args:
        logits: [R, V], not changed.
        mask_token: banned in every row: it would be committed as text.
        count: [1] number of rows that are real.
        sequence, position: [R] int64, sequence and block position of each row, any valid ones beyond `count`.
        temperature: [S] float32, above 0.
        top_k: [S] int64, 1 to 64; 1 takes the greedy head's token.
        top_p, min_p: [S] float32, LMDeploy's; 1 and 0 change nothing.
        seeds: [S] int64.
        random_offset: [S] int64; a row's place in its sequence's random stream is random_offset * length + position.
        length: L, block positions.

    Returns:
        Tokens [R] int64 and their probability [R] float32: softmax over the whole vocabulary but the mask token, after
        temperature and before any filter. A row with a logit that is not a number or +inf gives the first such token
        and NaN. Rows from `count` on give -1 and 0.
    """
    values = logits.float().index_fill(1, torch.tensor([mask_token], device=logits.device), float('-inf'))
    values = torch.where(values.isnan(), float('inf'), values)
    offsets = random_offset[sequence] * length + position
    best, candidates = _candidates(values)
    settings = [setting[sequence][:, None] for setting in (temperature.double(), top_k, top_p.double(), min_p.double())]
    column = _draw(best.double(), uniform(seeds[sequence], offsets)[:, None].double(), *settings)
    tokens = candidates.gather(1, column)
    scaled = values / temperature[sequence][:, None]
    scores = (scaled.gather(1, tokens)[:, 0] - scaled.logsumexp(1)).exp()
    real = torch.arange(logits.size(0), device=logits.device) < count
    return torch.where(real, tokens[:, 0], -1), torch.where(real, scores, 0)
