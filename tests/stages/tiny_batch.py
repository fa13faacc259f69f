"""Sequences of the tiny decoder as the engine has them: a state table, paged caches and stop words."""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmdeploy_focus.stages.decoder import KVCache, Model
from lmdeploy_focus.stages.state import FocusState, first_rows
from lmdeploy_focus.stages.step_options import StepOptions

from .. import oracle
from ..kernels.block_life import Rules
from .simulation import Sequence, TinyLife
from .tiny_decoder import KV_HEADS, MASK_TOKEN, SIZE, VOCABULARY, TinyDecoder, caches

FOCUS = StepOptions(selection='top', keep=None, cache='delayed-neighbour', kv_visible='progress', commit='uncached',
                    strategy='low_confidence_dynamic', tokens_per_step=4, mask_token=MASK_TOKEN, page_size=64)


def rules(options: StepOptions, length: int) -> Rules:
    """The same for lives."""
    return Rules(length, options.strategy, options.tokens_per_step, options.cache, options.commit == 'full')


def start(options: StepOptions, length: int, count: int, seed: int, threshold: float = .7,
          stops: bool = False) -> list[TinyLife]:
    """Sequences as they come from prefill: new blocks, and such that the prompt begins; texts of various lengths before
    them; with `stops`, caps and a stop word each.

    The first block of a text begins with some prompt: masked rows that see masked rows alone are all equal, and
    rounding would choose among them.
    """
    random = torch.Generator().manual_seed(seed)
    lives = []
    for s in range(count):
        history = length * (s * 5 % 4)
        prompt = int(torch.randint(int(not history), length, (1,), generator=random)) if s % 3 or not history else 0
        ids = torch.randint(VOCABULARY - 1, (length,), generator=random).tolist()
        cap, word = (int(torch.randint(most, (1,), generator=random)) for most in (5 * length, VOCABULARY - 1))
        lives.append(TinyLife(
            rules(options, length), ids[:prompt] + [MASK_TOKEN] * (length - prompt), set(range(prompt, length)),
            history, prompt + 1 + cap if stops else 10**9, history + prompt, {word} if stops and s % 2 else set(),
            threshold, oracle.Block(length, options.cache), [0] * length))
    return lives


@dataclass
class TinyBatch:
    """The engine's side of some sequences.

    Attributes:
        model: decoder, head, caches and kernels.
        state: of the sequences.
        page_table: [S, P] int64.
        stop_words: [S, 1] int64.
        page_size: G.
    """
    model: Model
    state: FocusState
    page_table: Tensor
    stop_words: Tensor
    page_size: int

    def text(self, half: Tensor, s: int) -> Tensor:
        """The keys or values of sequence s in the order of its text, written or not."""
        return half[self.page_table[s]].flatten(0, 1)

    def take(self, s: int) -> 'TinyBatch':
        """Sequence s alone, with a copy of the caches."""
        state = FocusState(1, self.state.length, 'cpu')
        state.append(self.state.table[s:s + 1])
        one = slice(s, s + 1)
        return replace(self, state=state, page_table=self.page_table[one], stop_words=self.stop_words[one],
                       model=replace(self.model, caches=[(key.clone(), value.clone())
                                                         for key, value in self.model.caches]))

    def simulate(self, lives: list[TinyLife]) -> list[Sequence]:
        """The same sequences for the golden model."""
        return [Sequence(life, [(self.text(key, s), self.text(value, s)) for key, value in self.model.caches])
                for s, life in enumerate(lives)]


def make(lives: list[TinyLife], page_size: int, blocks: int, seed: int, room: int | None = None) -> TinyBatch:
    """Lives in a state, their history in the caches of a new decoder, and pages for so many blocks more; room for more
    sequences than there are."""
    length, decoder = lives[0].rules.length, TinyDecoder(seed)
    random = torch.Generator().manual_seed(seed)
    state = FocusState(room or len(lives), length, 'cpu')
    state.append(rows(lives))
    columns = -(-(max(life.history for life in lives) + (blocks + 1) * length) // page_size)
    table = torch.randperm(len(lives) * columns, generator=random).view(-1, columns)
    paged: list[KVCache] = caches(table.numel(), page_size)
    for s, life in enumerate(lives):
        place = torch.arange(life.history)
        for half in (half for cache in paged for half in cache):
            half[table[s, place // page_size], place % page_size] = torch.randn(life.history, KV_HEADS, SIZE,
                                                                                generator=random)
    words = torch.tensor([[*life.stop_words, -1][:1] for life in lives])
    return TinyBatch(decoder.model(paged), state, table, words, page_size)


def rows(lives: list[TinyLife]) -> Tensor:
    """Rows of a state table for sequences that come from prefill."""
    def of(name: str) -> Tensor:
        return torch.tensor([getattr(life, name) for life in lives])

    masked = torch.tensor([[p in life.waiting for p in range(life.rules.length)] for life in lives])
    return first_rows(of('ids'), masked, of('history'), of('appendable'), of('output_start'), of('random_offset'), 1.5,
                      lives[0].threshold)
