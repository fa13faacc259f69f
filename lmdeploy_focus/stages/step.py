"""One denoising step of a block, as the paper's algorithm: calls, no tensor arithmetic."""
from dataclasses import dataclass

from torch import Tensor

from . import budget, compact, delayed_cache, importance, prefix, select, suffix
from .decoder import Decoder, KVCache
from .state import FocusState
from .unmask import UnmaskRule, unmask
from .view import FocusView, entering_view


@dataclass(frozen=True)
class StepOptions:
    """The options of a step; names and values are those of the user's options."""
    alpha: float
    selection: str
    keep: int | None
    cache: str
    kv_visible: str
    commit: str
    sequential: int = 0


@dataclass
class Denoised:
    """What a step leaves before sampling.

    Attributes:
        hidden: [1, N, E] final hidden states of the kept rows.
        entered, kept: views of the rows before and after eviction.
        delta: [S, L] importance delta of the masked tokens in block order, None in a step without eviction.
    """
    hidden: Tensor
    entered: FocusView
    kept: FocusView
    delta: Tensor | None


def enter(ids: Tensor, mask: Tensor, state: FocusState, history: Tensor, page_table: Tensor, page_size: int,
          max_kv: int, options: StepOptions) -> FocusView:
    """The rows of the blocks that are not cached yet."""
    entering = delayed_cache.entering(state, mask, options.cache, options.commit == 'full')
    view = entering_view(ids, entering, mask, history, page_table, page_size, history, max_kv)
    view.kv_len = delayed_cache.visible(history, view.rightmost(), state, options.kv_visible)
    return view


def denoise(decoder: Decoder, caches: list[KVCache], view: FocusView, state: FocusState, options: StepOptions,
            evicting: bool) -> Denoised:
    """Prefix, importance, budget, selection, compaction, suffix."""
    hidden, rotary = prefix.embed(decoder, view)
    first = prefix.queries(decoder.layers[0], caches[0], hidden, None, rotary, view)
    hidden, residual = prefix.finish(decoder.layers[0], caches[0], first, view)
    if not evicting:
        return Denoised(suffix.run(decoder, caches, hidden, residual, rotary, view, 1), view, view, None)
    second = prefix.queries(decoder.layers[1], caches[1], hidden, residual, rotary, view)

    rows, positions = view.candidates()
    delta = importance.delta(first, second, rows)
    budgets = budget.allot((rows >= 0).sum(1), state, options.alpha, options.keep)
    keep = select.keep_rows(delta, rows, positions, budgets, view, state.progress, options.selection,
                            options.keep is not None, options.sequential)

    kept, index = compact.take(view, keep, view.kv_len)
    kept.kv_len = delayed_cache.visible(view.history, kept.rightmost(), state, options.kv_visible)
    second, rotary = compact.take_queries(second, rotary, index)
    hidden, residual = prefix.finish(decoder.layers[1], caches[1], second, kept)
    return Denoised(suffix.run(decoder, caches, hidden, residual, rotary, kept, 2), view, kept, delta)


def settle(ids: Tensor, mask: Tensor, state: FocusState, rightmost: Tensor, rows: Tensor, tokens: Tensor,
           scores: Tensor, rule: UnmaskRule, options: StepOptions) -> tuple[Tensor, Tensor, FocusState]:
    """Unmask the sampled tokens, then freeze what is final: ids and mask [S, L] and the state after the step."""
    new_ids, new_mask = unmask(ids, mask, rows, tokens, scores, rule)
    return new_ids, new_mask, delayed_cache.advance(state, mask, new_mask, rightmost, options.cache)
