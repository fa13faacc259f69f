"""LMDeploy's step inputs and FocusState together, beside one simulation a request."""
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta

from lmdeploy_focus.engine.step_inputs import FocusExtraInputs, FocusExtraOutputs, FocusStepInputs
from lmdeploy_focus.engine.stopping import FocusStoppingCriteria
from lmdeploy_focus.stages import compact, step
from lmdeploy_focus.stages.unmask import UnmaskRule

from .. import oracle
from . import blocks

MASK_TOKEN, PAGE_SIZE = 999, 10**6  # of pages, only the tables matter here
OPTIONS = step.StepOptions(alpha=1.5, selection='top', keep=None, cache='delayed-neighbour', kv_visible='progress',
                           commit='uncached')
RULE = UnmaskRule('low_confidence_dynamic', .7, 4)
SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Request:
    """What one request should look like in the batch.

    Attributes:
        history: committed tokens.
        ids, mask: of the block.
        offset: place in the random stream.
        start, appendable: text position of the first generated token, and how many may come.
        pages: its page table.
    """
    history: int
    ids: list[int]
    mask: list[int]
    offset: int
    start: int
    appendable: int
    pages: list[int]
    block: oracle.Block = field(repr=False)

    def begin_if_cached(self, rule_of_cache: str) -> None:
        """The next block, once this one is committed."""
        if all(m == oracle.CACHED for m in self.mask):
            length = len(self.mask)
            self.history += length
            self.ids, self.mask = [MASK_TOKEN] * length, [oracle.MASKED] * length
            self.block = oracle.Block(length, rule_of_cache)


class Batch(RuleBasedStateMachine):
    """Prefills, decode steps and departures in any order, as the model agent makes them."""

    @initialize(length=st.sampled_from((4, 16, 32)))
    def start(self, length):
        self.length = length
        self.inputs = FocusStepInputs(_block_size=length, _dllm_mask_token=MASK_TOKEN)
        self.requests: list[Request] = []

    @precondition(lambda self: len(self.requests) < 20)
    @rule(kinds=st.lists(st.sampled_from(('full', 'partial', 'decided')), min_size=1, max_size=4), seed=SEEDS)
    def prefill(self, kinds, seed):
        """Prompts that end with a block, amid one that prefill has denoised, or amid one that it has decided wholly;
        of one block or more, of first or later turns (with history)."""
        random, length = np.random.default_rng(seed), self.length
        arrivals, flat = [], []
        for kind in kinds:
            past, new = (length * int(n) for n in random.integers((0, 1), 3))
            ids = random.integers(0, 900, size=new)
            mask = {'full': np.full(length, oracle.CACHED), 'decided': np.full(length, oracle.UNMASKED),
                    'partial': random.permutation(np.arange(length) % 2)}[kind]
            flat.append(ids)
            last = np.where(mask == oracle.MASKED, MASK_TOKEN, ids[-length:])
            arrivals.append((past, new, Request(
                history=past + new - length, ids=last.tolist(), mask=mask.tolist(), offset=int(random.integers(99)),
                start=past + int(random.integers(new)), appendable=int(random.integers(1, 99)),
                pages=random.integers(1, 99, size=4).tolist(), block=oracle.Block(length, progress=-1))))
        self.merge(arrivals, np.concatenate(flat), seed)

    def merge(self, arrivals, flat, seed):
        """Hand the prefill's results over; masked positions carry any token, as after sampling."""
        past, new, requests = (list(column) for column in zip(*arrivals, strict=True))
        width = 2 + seed % 3
        tokens = torch.tensor([request.ids for request in requests])
        mask = torch.tensor([request.mask for request in requests], dtype=torch.uint8)
        for request in requests:
            request.pages = request.pages[:width]
        self.inputs.merge_prefill(
            ModelInputs(input_ids=torch.from_numpy(flat)[None], seq_length=torch.tensor(new),
                        history_lengths=torch.tensor(past),
                        block_offsets=torch.tensor([request.pages for request in requests]), is_decoding=False,
                        num_ignored_history=torch.zeros(len(new), dtype=torch.int64), max_q_seqlen=max(new),
                        max_kv_seqlen=max(p + n for p, n in zip(past, new, strict=True)),
                        sum_kv_seqlen=sum(past) + sum(new)),
            FocusExtraInputs(mask.flatten(), torch.tensor([request.start for request in requests])),
            FocusStoppingCriteria(torch.tensor([request.appendable for request in requests]),
                                  torch.tensor([request.start for request in requests])),
            SamplingInputsDelta(random_offsets=torch.tensor([request.offset for request in requests])),
            torch.where(mask == oracle.MASKED, seed % 900, tokens).flatten(), None, FocusExtraOutputs(mask.flatten()))
        for request in requests:
            request.offset += 1
            request.begin_if_cached('delayed-neighbour')
        self.requests += requests

    @precondition(lambda self: self.requests)
    @rule(seed=SEEDS, share=st.floats(0, 1), remap=st.booleans())
    def depart(self, seed, share, remap):
        """Finished and preempted sequences leave; the rest may change places and get new page tables."""
        random = np.random.default_rng(seed)
        order = random.permutation(len(self.requests))
        order = order[:round(share * len(order))]
        self.requests = [self.requests[i] for i in order]
        if remap:
            for request in self.requests:
                request.pages = random.integers(1, 99, size=5).tolist()
        bound = max((request.history for request in self.requests), default=0) + 2 * self.length
        table = torch.tensor([request.pages for request in self.requests]).view(len(order), 5) if remap else None
        self.inputs.reindex(ModelInputsDelta(
            indices=torch.from_numpy(order), block_offsets=table, indice_cpu=order, max_q_seqlen=self.length,
            max_kv_seqlen=bound, sum_kv_seqlen=bound * len(order)))

    @precondition(lambda self: self.requests)
    @rule(seed=SEEDS)
    def decode(self, seed):
        """A denoising step with random kept rows and tokens."""
        random, inputs, extra = np.random.default_rng(seed), self.inputs.model_inputs, self.inputs.extra_inputs
        ids, mask = inputs.input_ids.view(-1, self.length), extra.dllm_mask.view(-1, self.length)
        view = step.enter(ids, mask, extra.state, inputs.history_lengths, inputs.block_offsets, PAGE_SIZE,
                          inputs.max_kv_seqlen, OPTIONS)
        entering = torch.zeros(mask.shape, dtype=torch.bool)
        entering[view.sequence, view.position] = True
        keep = blocks.evict(entering, mask, extra.state.progress, random)
        kept, _ = compact.take(view, keep[entering], view.kv_len)
        sequence, position = kept.sequence[kept.masked], kept.position[kept.masked]
        tokens = torch.from_numpy(random.integers(0, 900, size=len(sequence)))
        scores = torch.from_numpy(random.random(len(sequence)).astype(np.float32))
        rows = sequence * self.length + position
        new_ids, new_mask, state = step.settle(ids, mask, extra.state, kept.rightmost(), rows, tokens, scores, RULE,
                                               OPTIONS)
        self.inputs.step_decode(inputs, FocusExtraInputs(new_mask.flatten(), extra.output_start, state),
                                self.inputs.stopping_criteria, self.inputs.sampling_delta, new_ids.flatten(), None,
                                FocusExtraOutputs(new_mask.flatten()))
        sampled = [{} for _ in self.requests]
        for s, p, *drawn in zip(sequence.tolist(), position.tolist(), tokens.tolist(), scores.tolist(), strict=True):
            sampled[s][p] = tuple(drawn)
        self.advance_requests(keep, sampled)

    def advance_requests(self, keep, sampled):
        """The same step, one request at a time."""
        for s, request in enumerate(self.requests):
            before = request.mask
            request.ids, request.mask = oracle.unmask(request.ids, before, sampled[s], RULE.strategy, RULE.threshold, 0)
            request.block.advance(before, request.mask, int(keep[s].nonzero().max()))
            request.offset += 1
            request.begin_if_cached('delayed-neighbour')

    @invariant()
    def batch_is_the_requests(self):
        """Every row, in order."""
        inputs, extra, requests = self.inputs.model_inputs, self.inputs.extra_inputs, self.requests
        if inputs is None:
            return
        length = self.length
        assert inputs.is_decoding and inputs.input_ids.shape == (1, len(requests) * length)
        assert inputs.input_ids.view(-1, length).tolist() == [request.ids for request in requests]
        assert extra.dllm_mask.view(-1, length).tolist() == [request.mask for request in requests]
        assert inputs.history_lengths.tolist() == [request.history for request in requests]
        assert inputs.seq_length.tolist() == [length] * len(requests)
        assert inputs.max_kv_seqlen >= max((request.history + length for request in requests), default=0)
        for row, request in zip(inputs.block_offsets.tolist(), requests, strict=True):
            assert row[:len(request.pages)] == request.pages
        assert extra.output_start.tolist() == [request.start for request in requests]
        criteria = self.inputs.stopping_criteria
        assert criteria.output_start_pos.tolist() == [request.start for request in requests]
        assert criteria.num_appendable_ids.tolist() == [request.appendable for request in requests]
        assert self.inputs.sampling_delta.random_offsets.tolist() == [request.offset for request in requests]
        blocks.assert_same(extra.state, [request.block for request in requests], length)


# 5,000 events in 200 interleavings. Red when: a row of ids, mask, state, stops or random offsets goes with another
# request, a new block keeps its predecessor's state, a prefilled one starts with anything but a fresh one, the text of
# a request moves on too early or too late, or max_kv_seqlen stops being a bound.
TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=200, stateful_step_count=25, deadline=None, derandomize=True)
