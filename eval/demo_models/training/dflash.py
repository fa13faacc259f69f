"""Phase `dflash`: a drafter for `ar`, mostly on the target's own answers (DFlash, arXiv 2602.06036)."""
import random
import time
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.dflash_training.blocks import cut_blocks, decay, draw_anchors, visible

from ..checkpoint import load_decoder, save_draft
from ..network import Decoder, Draft, rope_table
from ..reference_ar import decode_ar
from ..tasks import training_pairs
from ..tokenizer import END_OF_TEXT, IM_END, MASK, encode_prompts, load_tokenizer
from .loop import Journal, cross_entropy, train, warm_up
from .optimizer import Optimizer
from .packing import document
from .rows import Rows, unpack
from .settings import Settings

_LAYERS, _TARGET_LAYERS, _BLOCK_LENGTH = 3, (1, 3, 5), 16
_OWN_ANSWERS = 0.7          # share of a batch
_DECODING_TIME = 0.3        # share of the phase


def policy_documents(settings: Settings, target: Decoder, tokenizer: Tokenizer, seconds: float) -> list[np.ndarray]:
    """Documents of greedy answers of the target to training prompts, for about that long."""
    rng = random.Random(f'policy-{settings.seed}')
    length = settings.length
    max_new = min(settings.policy_new, length - 192 if length > 400 else length // 2)
    end = time.time() + seconds
    documents: list[np.ndarray] = []
    while not documents or time.time() < end:
        prompts: list[list[int]] = []
        while len(prompts) < settings.policy_batch:
            encoded = encode_prompts(tokenizer, [prompt for prompt, _ in training_pairs(rng, 512)])
            prompts += [prompt for prompt in encoded if len(prompt) <= min(192, length // 3)]
        prompts = prompts[:settings.policy_batch]
        for prompt, (answer, stopped) in zip(prompts, decode_ar(target, prompts, max_new), strict=True):
            documents.append(document(prompt, answer + [IM_END] * stopped)[:length])
    rng.shuffle(documents)
    return documents


def pack_in_order(documents: list[np.ndarray], length: int) -> np.ndarray:
    """uint16 [rows, length]; a document that does not fit starts the next row."""
    rows, used = [np.full(length, END_OF_TEXT, np.uint16)], 0
    for tokens in documents:
        if used + len(tokens) > length:
            rows.append(np.full(length, END_OF_TEXT, np.uint16))
            used = 0
        rows[-1][used:used + len(tokens)] = tokens
        used += len(tokens)
    return np.stack(rows)


class Drafting:
    """Loss of a batch: many blocks a row, each after an anchor that the drafter may know."""

    def __init__(self, settings: Settings, target: Decoder, draft: Draft, rows: Rows, own: Rows):
        self.settings, self.target, self.draft, self.rows, self.own = settings, target, draft, rows, own
        shape, device = target.shape, settings.device
        self.cos, self.sin = rope_table(settings.length + _BLOCK_LENGTH, shape.head_size, shape.rope_theta, device)
        self.context_rope = (self.cos[None, :settings.length], self.sin[None, :settings.length])
        self.decay = decay(_BLOCK_LENGTH, device)
        self.loss = cross_entropy(settings.compile)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Token ids and assistant flags, most of them of the target's own answers."""
        size = self.settings.batch_dflash
        own = min(max(1, int(size * _OWN_ANSWERS)), self.own.count)
        return unpack(torch.cat([self.own.batch(own), self.rows.batch(size - own)]))

    def step(self) -> Tensor:
        """The loss of the next batch."""
        settings, target, length = self.settings, self.target, self.settings.length
        ids, assistant = self.batch()
        with torch.no_grad():
            _, features = target.trunk(ids, *self.context_rope, 'causal', dtype=settings.dtype,
                                       collect=self.draft.target_layers)
        answer = assistant & (ids != END_OF_TEXT)
        anchors, real = draw_anchors(answer, settings.anchors)
        blocks = cut_blocks(ids, answer, anchors, real, _BLOCK_LENGTH, MASK)
        x = target.embed(blocks.ids.flatten(1), settings.dtype)
        flat = blocks.positions.flatten(1)
        hidden = self.draft(x, features, (self.cos[flat], self.sin[flat]), self.context_rope,
                            visible(anchors, length, _BLOCK_LENGTH))
        hidden = hidden.view(*blocks.positions.shape, -1)[:, :, 1:]
        weight = blocks.counted * self.decay
        loss = self.loss(hidden.contiguous(), target.embed_tokens.weight, blocks.labels.contiguous())
        return (loss * weight).sum() / weight.sum().clamp_min(1.0)


def train_dflash(settings: Settings, rows: Rows, journal: Journal) -> None:
    """Reads `ar`, writes `dflash`."""
    torch.manual_seed(settings.seed + 2)
    start = time.time()
    target = load_decoder(settings.out / 'ar', settings.device)
    writer = load_decoder(settings.out / 'ar', settings.device, settings.dtype)
    seconds = settings.minutes_dflash * 60 * _DECODING_TIME
    documents = policy_documents(settings, writer, load_tokenizer(settings.out / 'ar'), seconds)
    packed = pack_in_order(documents, settings.length)
    journal.log(f'dflash: {len(documents)} answers of the target in {len(packed)} rows')
    own = Rows(settings.length, len(packed), settings.device)
    own.add(packed)
    own.shuffle()
    rows.wait(settings.rows_at_start)
    draft = Draft(replace(target.shape, layers=_LAYERS), _TARGET_LAYERS, _BLOCK_LENGTH).to(settings.device)
    optimizer = Optimizer(draft, settings.matrix_rate, settings.other_rate)
    drafting = Drafting(settings, target, draft, rows, own)
    warm_up('dflash', drafting.step, [*target.layers, *draft.layers], draft.parameters(), settings.compile, journal)
    left = max(0.1 * settings.minutes_dflash, settings.minutes_dflash - (time.time() - start) / 60)
    train('dflash', drafting.step, optimizer, left, settings.batch_dflash * settings.length, rows.poll, journal)
    save_draft(draft, settings.out / 'dflash', target.shape.layers)
