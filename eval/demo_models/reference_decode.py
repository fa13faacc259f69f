"""Block diffusion decoding in plain torch: dense, with the delayed cache, with FOCUS (arXiv 2601.23278).

The project's golden decode: slow, dense and close to the paper. Every step computes all L positions of every block and
throws away what a serving engine would not have computed. Letters: S sequences, L block length.
"""
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from .decode_options import Counters, Decoded, DecodeOptions
from .decode_state import BlockState, Forced, last_position
from .network import Decoder, attend, rope_table
from .reference_cache import KVCache, pad_prompts, prefill, reach, until_stop
from .reference_selection import budget, importance, select
from .tokenizer import END_OF_TEXT, MASK

__all__ = ['BlockDecode', 'BlockState', 'Counters', 'DecodeOptions', 'Decoded', 'Forced', 'decode']

Record = dict[str, Tensor]


class BlockDecode:
    """A batch in decoding: `step` may be called while `running`; a sequence whose answer is complete leaves the batch.

    Both `prefill_record` (None unless prefill denoised a partial block) and the result of `step` hold, as tensors: the
    state before the step under the names of `BlockState`; `committing` [S]; `processed` [S, L] (through layers 0 and
    1), `kept` [S, L] (all that went on, decoded positions included), `visible_prefix` and `visible` [S] (keys that
    layer 0 and later layers see); with scores, `delta` [S, L]; in mode 'focus', `budget` [S]; and `maximum`, `argmax`,
    `confidence`, `unmasked` [S, L] of the logits, which mean something at kept masked positions only.
    """

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], options: DecodeOptions):
        """Prefill of the prompts.

        Raises:
            ValueError: there is no prompt, or one without a token.
        """
        if not prompts or not all(prompts):
            raise ValueError('prompts: expected at least one, each with at least one token')
        self.model, self.options = model, options
        device, length = model.device, options.block_length
        width = -(-max(map(len, prompts)) // length) * length
        ids, lengths = pad_prompts(prompts, width, device)
        self.lengths = lengths          # of all prompts, like `text` and `counters`: indexed by the state's row
        self.positions = width + (-(-options.max_new // length) + 2) * length
        self.cos, self.sin = rope_table(self.positions, model.shape.head_size, model.shape.rope_theta, device)
        self.cache = KVCache(len(model.layers), len(prompts), self.positions, model.shape, device, model.dtype)
        self.offsets = torch.arange(length, device=device)[None]
        self.generator = torch.Generator(device=device).manual_seed(options.seed)
        self.stops = torch.tensor(options.stop_ids, device=device)
        zero = torch.zeros_like(lengths)
        self.counters = {field.name: zero.clone() for field in fields(Counters)}
        self.text = torch.full((len(prompts), self.positions), END_OF_TEXT, dtype=torch.long, device=device)
        self.text[:, :width] = ids
        history, row = lengths // length * length, torch.arange(len(prompts), device=device)
        masked = history[:, None] + self.offsets >= lengths[:, None]
        block = torch.where(masked, MASK, self.text[row[:, None], history[:, None] + self.offsets])
        self.state = BlockState(row, block, masked, torch.ones_like(masked), history, zero - 1, zero, zero)
        self.prefill_record: Record | None = None
        self._prefill(ids)

    @property
    def running(self) -> bool:
        """Whether an answer is still incomplete."""
        return len(self.state.row) > 0

    @torch.no_grad()
    def _prefill(self, ids: Tensor) -> None:
        """Dense block-causal pass over the prompts; with partial_block='prefill' it also denoises partial blocks."""
        state, width, length = self.state, ids.shape[1], self.options.block_length
        partial = (self.lengths % length > 0) & (self.options.partial_block == 'prefill')
        places = (state.history[:, None] + self.offsets).clamp_max(width - 1)
        rows = state.row[:, None]
        ids = ids.clone()
        ids[rows[partial], places[partial]] = state.ids[partial]
        block = torch.arange(width, device=ids.device) // length
        hidden, _ = prefill(self.model, self.cache, ids, self.cos, self.sin, (block[:, None] >= block)[None, None])
        if not bool(partial.any()):
            return
        everything = torch.ones_like(state.masked)
        record = self._record(everything, torch.zeros_like(partial))
        record['kept'], record['visible'] = everything, record['visible_prefix']
        self._unmask(hidden[rows, places], record, state.masked & partial[:, None])
        self.prefill_record = record
        self.counters['prefill_decoded'] += record['unmasked'].sum(1)
        self.state = replace(state, ids=torch.where(record['unmasked'], record['argmax'], state.ids),
                             masked=state.masked & ~record['unmasked'],
                             progress=torch.where(partial, length - 1, state.progress))
        ended = self._ended()
        if not self.options.final_commit:
            self._drop(ended)

    @torch.no_grad()
    def step(self, forced: Forced | None = None) -> Record:
        """One forward of every sequence: a denoising step, or a commit where the block is complete on input."""
        options, state = self.options, self.state
        committing = ~state.masked.any(1)
        processed = torch.ones_like(state.masked)
        if options.mode != 'base' and options.cache != 'off':
            processed = torch.where(state.uncached.any(1, keepdim=True), state.uncached, processed)
            if options.commit == 'full':
                processed = processed | committing[:, None]
        record = self._record(processed, committing)
        hidden = self._forward(record, forced)
        self._unmask(hidden, record, state.masked & record['kept'])
        ids = record['argmax']
        if forced is not None:
            if forced.unmasked is not None:
                record['unmasked'] = forced.unmasked & state.masked
            ids = ids if forced.ids is None else forced.ids
        self._count(record)
        self._advance(record, torch.where(record['unmasked'], ids, state.ids))
        return record

    def _record(self, processed: Tensor, committing: Tensor) -> Record:
        record = {field.name: getattr(self.state, field.name) for field in fields(self.state)}
        return record | {'committing': committing, 'processed': processed, 'visible_prefix': self._visible(processed)}

    def _visible(self, rows: Tensor) -> Tensor:
        """Keys that rows [S, L] see, int64 [S]."""
        if self.options.mode == 'base':
            return self.state.history + self.options.block_length
        last = last_position(rows)
        if self.options.kv_visible == 'progress':
            last = torch.maximum(last, self.state.progress)
        return self.state.history + last + 1

    def _forward(self, record: Record, forced: Forced | None) -> Tensor:
        """All layers over the whole blocks, [S, L, C]; completes the record with what was kept."""
        state, model, focus = self.state, self.model, self.options.mode == 'focus'
        length = reach(int(state.history.max()) + self.options.block_length, self.positions)
        keys = torch.arange(length, device=model.device)
        positions = state.history[:, None] + self.offsets
        cos, sin = self.cos[positions], self.sin[positions]
        record['kept'], record['visible'] = record['processed'], record['visible_prefix']
        scores: list[Tensor] = []
        x = model.embed(state.ids, model.dtype)
        for index, layer in enumerate(model.layers):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, cos, sin)
            key, value = layer.self_attn.key_value(normed, cos, sin)
            # Eviction comes after layer 1's write: that layer has keys of all processed positions.
            self.cache.write(index, positions, key, value, record['kept'])
            if index < 2 and (focus or self.options.score_always):
                scores.append(importance(query, key, state.masked))
                if index == 1:
                    record['delta'] = scores[1] - scores[0]
            if index == 1 and focus:
                self._evict(record, forced)
            mask = (keys < record['visible'][:, None])[:, None, None]
            x = layer.finish(x, attend(query, *self.cache.read(index, length), mask))
        return model.norm(x)

    def _evict(self, record: Record, forced: Forced | None) -> None:
        """Choose the masked positions that go on; decoded positions that were processed always do."""
        state, options = self.state, self.options
        if options.keep is None:
            record['budget'] = budget(state.masked, state.decoded, state.steps, options.alpha)
        else:
            record['budget'] = state.masked.sum(1).clamp_max(options.keep)
        score = record['delta']
        if options.selection == 'bottom':
            score = -score
        elif options.selection == 'random':
            draws = torch.rand((len(self.lengths), score.shape[1]), device=score.device, generator=self.generator)
            score = draws[state.row]
        if forced is not None and forced.kept is not None:
            kept = forced.kept & state.masked
        else:
            kept = select(score, state.masked, state.progress, record['budget'], options.rules)
        record['kept'] = kept | (record['processed'] & ~state.masked)
        record['visible'] = self._visible(record['kept'])

    def _unmask(self, hidden: Tensor, record: Record, candidates: Tensor) -> None:
        """Confidence of every position; the best candidate and all from the threshold on are unmasked."""
        logits = self.model.logits(hidden).float()
        logits[..., MASK] = float('-inf')
        record['maximum'], record['argmax'] = logits.max(-1)
        record['confidence'] = (record['maximum'] - logits.logsumexp(-1)).exp()
        confidence = torch.where(candidates, record['confidence'], -1.0)
        best = self.offsets == confidence.argmax(1, keepdim=True)
        record['unmasked'] = candidates & ((confidence >= self.options.threshold) | best)

    def _count(self, record: Record) -> None:
        committing = record['committing'].long()
        suffix = record['kept'].sum(1)
        evicting = (record['masked'] & ~record['kept']).any(1).long()
        cost = {'steps': 1 - committing, 'commit_steps': committing, 'decoded_tokens': record['unmasked'].sum(1),
                'prefix_rows': record['processed'].sum(1), 'suffix_rows': suffix, 'commit_rows': suffix * committing,
                'evicting_steps': evicting, 'blocks': committing}
        for name, value in cost.items():
            self.counters[name][self.state.row] += value

    def _advance(self, record: Record, ids: Tensor) -> None:
        """The state after the step. What is frozen depends on the mask on input, not on what was just unmasked."""
        state, options = self.state, self.options
        newly = record['unmasked'].sum(1)
        final = ~state.masked
        if options.cache == 'delayed-neighbour':
            final = final & torch.cat([final[:, 1:], torch.ones_like(final[:, :1])], 1)
        progress = torch.maximum(state.progress, last_position(record['kept']))
        self.state = replace(state, ids=ids, masked=state.masked & ~record['unmasked'],
                             uncached=state.uncached & ~final, progress=progress,
                             decoded=state.decoded + newly, steps=state.steps + (newly > 0))
        ended = self._ended()
        if options.final_commit:
            ended &= record['committing']
        self._next_block(record['committing'])
        self._drop(ended)

    def _ended(self) -> Tensor:
        """Complete blocks go into the text; bool [S], those with a stop token or with the answer's last position."""
        state = self.state
        complete = ~state.masked.any(1)
        positions = state.history[:, None] + self.offsets
        lengths = self.lengths[state.row]
        stops = torch.isin(state.ids, self.stops) & (positions >= lengths[:, None]) & ~state.masked
        ends = stops | (positions - lengths[:, None] >= self.options.max_new - 1)
        if self.options.early_stop:
            decided = state.masked.cumsum(1) == 0
            complete |= (ends & decided).any(1)
        self.text[state.row[complete][:, None], positions[complete]] = state.ids[complete]
        return complete & ends.any(1)

    def _drop(self, ended: Tensor) -> None:
        """Sequences that are done leave the batch."""
        if bool(ended.any()):
            staying = (~ended).nonzero()[:, 0]
            self.state = self.state.take(staying)
            self.cache.take(staying)

    def _next_block(self, committed: Tensor) -> None:
        """Rows whose block was committed start a fresh one."""
        state, whole = self.state, committed[:, None]
        self.state = replace(state, ids=torch.where(whole, MASK, state.ids), masked=state.masked | whole,
                             uncached=state.uncached | whole,
                             history=state.history + self.options.block_length * committed,
                             progress=torch.where(committed, -1, state.progress),
                             decoded=torch.where(committed, 0, state.decoded),
                             steps=torch.where(committed, 0, state.steps))

    def results(self) -> list[Decoded]:
        """One answer a prompt, cut at the first stop token and at `max_new` tokens."""
        counters = {name: value.tolist() for name, value in self.counters.items()}
        answers = []
        for row, (text, start) in enumerate(zip(self.text.tolist(), self.lengths.tolist(), strict=True)):
            tokens, stopped = until_stop(text[start:start + self.options.max_new], self.options.stop_ids)
            cost = Counters(**{name: value[row] for name, value in counters.items()})
            answers.append(Decoded(tokens, stopped, cost))
        return answers


def decode(model: Decoder, prompts: Sequence[Sequence[int]], options: DecodeOptions,
           trace: Callable[[Record], None] | None = None) -> list[Decoded]:
    """Answers to prompts of token ids; `trace` is called with the record of every step, prefill's first."""
    run = BlockDecode(model, prompts, options)
    if trace is not None and run.prefill_record is not None:
        trace(run.prefill_record)
    while run.running:
        record = run.step()
        if trace is not None:
            trace(record)
    return run.results()
