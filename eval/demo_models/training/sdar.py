"""Phase `sdar`: block diffusion training, from the weights of `ar`.

A row is seen twice, masked and clean, side by side: a masked block attends to itself and to the clean blocks before it.
Rows of one batch have block lengths 32, 16, 8 and 4.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from ..checkpoint import load_decoder, save_sdar
from ..network import Decoder, attend, attend_flex, rope_table
from ..tokenizer import END_OF_TEXT, MASK
from .decodability import block_importance, decodability_loss
from .loop import Journal, cross_entropy, train, warm_up
from .optimizer import Optimizer
from .rows import Rows, unpack
from .settings import Settings

BLOCK_LENGTH = 32
_SHORTEST_BLOCK = 4
_SURE = 0.9


def visibility(lengths: Tensor, tokens: int) -> Callable[..., Tensor]:
    """Flex attention's mask function of [masked | clean] rows, with a block length for each row."""
    def sees(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        query_block, key_block = (query % tokens) // lengths[row], (key % tokens) // lengths[row]
        query_masked, key_masked = query < tokens, key < tokens
        return ((query_masked & key_masked & (query_block == key_block))
                | (query_masked & ~key_masked & (key_block < query_block))
                | (~query_masked & ~key_masked & (key_block <= query_block)))
    return sees


def dense_mask(lengths: Tensor, tokens: int) -> Tensor:
    """The same as a bool tensor [S, 1, 2 T, 2 T]."""
    index = torch.arange(2 * tokens, device=lengths.device)
    sees = visibility(lengths, tokens)
    rows = [sees(torch.tensor(row, device=lengths.device), None, index[:, None], index[None])
            for row in range(len(lengths))]
    return torch.stack(rows)[:, None]


def flex_mask(lengths: Tensor, tokens: int, model: Decoder):
    """The same as a block mask, checked against the dense one on the first row of each block length.

    Raises:
        RuntimeError: they give different attention.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    mask = create_block_mask(visibility(lengths, tokens), len(lengths), None, 2 * tokens, 2 * tokens,
                             device=lengths.device)
    heads = (model.shape.heads, model.shape.kv_heads, model.shape.kv_heads)
    query, key, value = (torch.randn(len(lengths), 2 * tokens, count, model.shape.head_size, device=lengths.device,
                                     dtype=torch.bfloat16) for count in heads)
    with torch.no_grad():
        found = torch.compile(attend_flex, dynamic=False)(query, key, value, mask)
        for length in lengths.unique():
            row = int((lengths == length).nonzero()[0])
            one = slice(row, row + 1)
            expected = attend(query[one], key[one], value[one], dense_mask(lengths[one], tokens))
            error = (found[one].float() - expected.float()).abs().max().item()
            if error > 0.12:
                raise RuntimeError(f'flex and dense attention differ by {error} at block length {int(length)}')
    return mask


def add_noise(ids: Tensor, assistant: Tensor, lengths: Tensor,
              suffix_share: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """Masks answer tokens of [S, T] at a rate that each block draws for itself; a quarter of the blocks is masked from
    a position on, as blocks in decoding often are.

    Returns:
        ids with MASK, the mask, and the weight of each token's loss.
    """
    sequences, tokens = ids.shape
    device, most_blocks = ids.device, tokens // _SHORTEST_BLOCK
    position = torch.arange(tokens, device=device)[None]
    block = position // lengths[:, None]
    golden = torch.arange(most_blocks, device=device)[None] * 0.6180339887
    rates = 0.02 + 0.98 * ((torch.rand(sequences, 1, device=device) + golden) % 1.0)
    rate = rates.gather(1, block)
    suffix = (torch.rand(sequences, most_blocks, device=device) < suffix_share).gather(1, block)
    from_the_end = 1.0 - (position % lengths[:, None] + 0.5) / lengths[:, None]
    scattered = torch.rand(sequences, tokens, device=device) < rate
    masked = torch.where(suffix, from_the_end < rate, scattered) & assistant
    return torch.where(masked, MASK, ids), masked, 1.0 / rate.clamp_min(0.15)


class BlockDiffusion:
    """Loss of a batch. The first rows, all of block length 32, carry the decodability term."""

    def __init__(self, settings: Settings, model: Decoder, rows: Rows):
        self.settings, self.model, self.rows = settings, model, rows
        shorter = settings.batch_sdar // 8
        longest = settings.batch_sdar - 3 * shorter
        self.lengths = torch.tensor([BLOCK_LENGTH] * longest + [16] * shorter + [8] * shorter + [4] * shorter,
                                    device=settings.device)
        self.scored = min(16, longest) if settings.decodability else 0
        self.attention = 'flex' if settings.device == 'cuda' and settings.compile else 'dense'
        if self.attention == 'flex':
            self.mask = flex_mask(self.lengths, settings.length, model)
        else:
            self.mask = dense_mask(self.lengths, settings.length)
        self.loss = cross_entropy(settings.compile)
        shape = model.shape
        self.rope = [torch.cat([table, table])[None]
                     for table in rope_table(settings.length, shape.head_size, shape.rope_theta, settings.device)]

    def step(self) -> Tensor:
        """The loss of the next batch."""
        settings, model, tokens, scored = self.settings, self.model, self.settings.length, self.scored
        ids, assistant = unpack(self.rows.batch(settings.batch_sdar))
        noisy, masked, weight = add_noise(ids, assistant, self.lengths)
        weight = weight * masked * torch.where(ids == END_OF_TEXT, 0.5, 1.0)
        cos, sin = self.rope
        blocks = masked[:scored].reshape(-1, BLOCK_LENGTH)
        order = torch.argsort((~blocks).int(), dim=1, stable=True)
        valid = torch.arange(BLOCK_LENGTH, device=ids.device)[None] < blocks.sum(1, keepdim=True)
        scores = []
        x = model.embed(torch.cat([noisy, ids], 1), settings.dtype)
        for index, layer in enumerate(model.layers):
            if scored and index < 2:
                normed = layer.input_layernorm(x[:scored, :tokens])
                scores.append(block_importance(layer.self_attn, normed, cos[:, :tokens], sin[:, :tokens], order, valid))
            x = layer(x, cos, sin, self.attention, self.mask)
        hidden = model.norm(x)[:, :tokens]
        loss = (self.loss(hidden, model.embed_tokens.weight, ids) * weight).sum() / assistant.sum()
        if scored:
            decodable = self._sure(hidden[:scored]).reshape(-1, BLOCK_LENGTH).gather(1, order) & valid
            loss = loss + settings.decodability * decodability_loss(scores[1] - scores[0], valid, decodable)
        return loss

    @torch.no_grad()
    def _sure(self, hidden: Tensor) -> Tensor:
        """Positions [R, T] whose token a decode step would unmask."""
        logits = self.model.logits(hidden).float()
        logits[..., MASK] = -1e9
        return (logits.amax(-1) - logits.logsumexp(-1)).exp() >= _SURE


def train_sdar(settings: Settings, rows: Rows, journal: Journal) -> None:
    """Reads `ar`, writes `sdar`."""
    torch.manual_seed(settings.seed + 1)
    model = load_decoder(settings.out / 'ar', settings.device).train().requires_grad_(True)
    optimizer = Optimizer(model, settings.matrix_rate * 0.6, settings.other_rate * 0.5)
    rows.wait(settings.rows_at_start)
    diffusion = BlockDiffusion(settings, model, rows)
    warm_up('sdar', diffusion.step, model.layers, model.parameters(), settings.compile, journal)
    train('sdar', diffusion.step, optimizer, settings.minutes_sdar, settings.batch_sdar * settings.length, rows.poll,
          journal)
    save_sdar(model, settings.out / 'sdar', BLOCK_LENGTH)
