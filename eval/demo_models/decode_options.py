"""Options of the reference decoder, and what it returns."""
import math
from dataclasses import dataclass

from .tokenizer import STOP_IDS

_CHOICES = {'mode': ('base', 'delayed', 'focus'), 'selection': ('top', 'random', 'bottom'),
            'cache': ('delayed-neighbour', 'delayed', 'off'), 'kv_visible': ('progress', 'reference'),
            'commit': ('uncached', 'full'), 'partial_block': ('prefill', 'decode')}


@dataclass(frozen=True)
class DecodeOptions:
    """How a batch is decoded.

    Attributes:
        mode: 'base' runs whole blocks, 'delayed' leaves out cached positions, 'focus' evicts on top of that.
        block_length: L.
        threshold: confidence from which on a token is unmasked; the best one always is.
        alpha: FOCUS' budget factor.
        selection: 'top' keeps the highest importance deltas; 'bottom' and 'random' are the paper's ablations.
        keep: a fixed budget instead of alpha's.
        paper_rules: whether the N-sigma and the left-neighbour rule hold. None: with 'top' and without `keep`, as in
            the engine; `True` together with `keep` or an ablation applies them to that ranking.
        cache: when a position is frozen in modes 'delayed' and 'focus': once it and its right neighbour were decoded
            on input, once it was, or never.
        kv_visible: 'progress' never hides a position that has been through all layers; 'reference' shows the keys up to
            the rightmost processed position only.
        commit: whether the commit of a block runs its uncached positions or all.
        partial_block: 'prefill' is the engine's rule: the prompt's last block, if it is not full, is filled up with
            masks and denoised once, densely, in prefill. Progress is L - 1 then, all positions stay uncached, and the
            budget does not count the tokens. A full last block is committed by prefill, which unmasks nothing.
            'decode': the prompt's last block is a decode block like any other.
        final_commit: whether the last block of an answer is committed too. An engine stops before; it changes the
            counters, never the tokens.
        early_stop: an answer ends as soon as nothing can precede its stop token or its last position any more, rather
            than with its block. It changes the counters, never the tokens.
        max_new: most tokens of an answer.
        stop_ids: tokens that end an answer.
        score_always: whether the importance delta is computed in modes 'base' and 'delayed' too, for a trace.
        seed: of selection 'random'.
    """

    mode: str = 'base'
    block_length: int = 32
    threshold: float = 0.9
    alpha: float = 1.5
    selection: str = 'top'
    keep: int | None = None
    paper_rules: bool | None = None
    cache: str = 'delayed-neighbour'
    kv_visible: str = 'progress'
    commit: str = 'uncached'
    partial_block: str = 'prefill'
    final_commit: bool = True
    early_stop: bool = False
    max_new: int = 256
    stop_ids: tuple[int, ...] = STOP_IDS
    score_always: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name}={getattr(self, name)!r}: expected one of {", ".join(choices)}')
        if not 0 < self.threshold <= 1:
            raise ValueError(f'threshold={self.threshold}: expected a number in (0, 1]')
        if not 1 <= self.alpha < math.inf:
            raise ValueError(f'alpha={self.alpha}: expected a number of at least 1')
        for name, value in (('block_length', self.block_length), ('max_new', self.max_new), ('keep', self.keep)):
            if value is not None and value < 1:
                raise ValueError(f'{name}={value}: expected at least 1')

    @property
    def rules(self) -> bool:
        """`paper_rules`, resolved."""
        if self.paper_rules is not None:
            return self.paper_rules
        return self.selection == 'top' and self.keep is None


@dataclass(frozen=True)
class Counters:
    """What one sequence cost. Prefill is not counted, except in `prefill_decoded`.

    Attributes:
        steps: denoising steps.
        commit_steps: forwards whose block was complete on input; an engine lets them ride along with the next step.
        decoded_tokens: tokens that denoising steps unmasked, padding after the stop token included.
        prefill_decoded: tokens that prefill unmasked in the prompt's last block.
        prefix_rows: tokens that went through layers 0 and 1, commits included.
        suffix_rows: tokens that went through layers 2 and later, commits included.
        commit_rows: the part of `suffix_rows`, and of `prefix_rows`, that belongs to commits.
        evicting_steps: steps that left out at least one masked token.
        blocks: committed blocks.
    """

    steps: int = 0
    commit_steps: int = 0
    decoded_tokens: int = 0
    prefill_decoded: int = 0
    prefix_rows: int = 0
    suffix_rows: int = 0
    commit_rows: int = 0
    evicting_steps: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Decoded:
    """One answer: its tokens before the stop token, whether there was one within the limit, and its cost."""

    tokens: list[int]
    stopped: bool
    counters: Counters
