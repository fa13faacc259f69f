"""LMDeploy's step inputs and outputs around a FocusState, beside one life a request."""
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta
from lmdeploy_focus.kernels.layout import report_width

from lmdeploy_focus.engine.step_inputs import FocusExtraInputs, FocusStepInputs
from lmdeploy_focus.engine.step_outputs import FocusBatchedOutputs, FocusExtraOutputs
from lmdeploy_focus.engine.stopping import FocusStoppingCriteria

from .. import oracle
from ..kernels.block_life import Life, Rules
from ..kernels.settle_checks import MASK_TOKEN
from . import blocks

THRESHOLDS = .5, .75, .875  # exact in float32 too, which confidences are
SEEDS = st.integers(0, 2**32 - 1)
MOST = 9


class Batch(RuleBasedStateMachine):
    """Prefills, decode steps and departures in any order, as the model agent makes them."""

    @initialize(length=st.sampled_from((4, 16, 32)))
    def start(self, length):
        self.length = length
        self.inputs = FocusStepInputs(_block_size=length, _dllm_mask_token=MASK_TOKEN)
        state = self.inputs.state_for(MOST, 'cpu')
        assert self.inputs.state_for(MOST, 'cpu') is state
        self.batch = blocks.Batch(Rules(length), state)
        self.pages: list[list[int]] = []
        self.joined = 0

    @precondition(lambda self: len(self.batch.lives) < MOST)
    @rule(kinds=st.lists(st.sampled_from(('full', 'partial')), min_size=1, max_size=4), seed=SEEDS)
    def prefill(self, kinds, seed):
        """Prompts that end with a block or amid one; of one block or more, of first or later turns (with history)."""
        random, length = np.random.default_rng(seed), self.length
        lives, past, new, last, mask = [], [], [], [], []
        for kind in kinds[:MOST - len(self.batch.lives)]:
            before, own = (length * int(n) for n in random.integers((0, 1), 3))
            prompt = length if kind == 'full' else int(random.integers(1, length))
            ids = random.integers(60, size=prompt).tolist()
            # a block that the prompt fills is committed: prefill has run it as it is
            last.append(ids + [MASK_TOKEN] * (length - prompt))
            mask.append([oracle.CACHED if kind == 'full' else oracle.UNMASKED] * prompt
                        + [oracle.MASKED] * (length - prompt))
            history = before + own - length * (kind == 'partial')
            ids = ids * (kind == 'partial')
            lives.append(Life(self.batch.rules, ids + [MASK_TOKEN] * (length - len(ids)), set(range(len(ids), length)),
                              history, int(random.integers(1, 99)), history + len(ids),
                              set(random.integers(60, size=2).tolist()), .75, oracle.Block(length), [0] * length,
                              random_offset=int(random.integers(99))))
            lives[-1].threshold = float(random.choice(THRESHOLDS))
            past.append(before)
            new.append(own)
        self.merge(lives, past, new, torch.tensor(last), torch.tensor(mask, dtype=torch.uint8))

    def merge(self, lives, past, new, last, mask):
        """Hand the prefill's results over."""
        def of(name):
            return torch.tensor([getattr(life, name) for life in lives])

        knobs = torch.tensor([[blocks.ALPHA, life.threshold] for life in lives], dtype=torch.float64)
        self.inputs.merge_prefill(
            ModelInputs(input_ids=torch.zeros(1, sum(new), dtype=torch.int64), seq_length=torch.tensor(new),
                        history_lengths=torch.tensor(past), block_offsets=torch.zeros(len(new), 1), is_decoding=False,
                        num_ignored_history=torch.zeros(len(new), dtype=torch.int64), max_q_seqlen=max(new),
                        max_kv_seqlen=max(p + n for p, n in zip(past, new, strict=True)),
                        sum_kv_seqlen=sum(past) + sum(new)),
            FocusExtraInputs(mask.flatten(), of('output_start'), knobs[:, 0], knobs[:, 1]),
            FocusStoppingCriteria(of('appendable'), of('output_start')),
            SamplingInputsDelta(random_offsets=of('random_offset')), last.flatten(), None,
            FocusExtraOutputs(mask.flatten()))
        for life in lives:
            life.random_offset += 1
        self.batch.lives += lives
        self.joined += len(lives)

    @precondition(lambda self: self.batch.lives)
    @rule(seed=SEEDS, share=st.sampled_from((0, .5, 1, 1)), paged=st.booleans())
    def depart(self, seed, share, paged):
        """Finished and preempted sequences leave; before a decode step all get page tables."""
        random, lives = np.random.default_rng(seed), self.batch.lives
        order = np.flatnonzero(random.random(len(lives)) < share)
        self.batch.lives = lives = [lives[i] for i in order]
        pages = random.integers(1, 99, size=(len(lives), 5))
        bound = max((life.history for life in lives), default=0) + 2 * self.length
        self.inputs.reindex(ModelInputsDelta(
            indices=torch.from_numpy(order), block_offsets=torch.from_numpy(pages) if paged else None,
            indice_cpu=order, max_q_seqlen=self.length, max_kv_seqlen=bound, sum_kv_seqlen=bound * len(order)))
        if paged:
            self.check_inputs(self.inputs.model_inputs, pages, bound)

    @precondition(lambda self: self.batch.lives)
    @rule(seed=SEEDS, steps=st.integers(1, 5))
    def decode(self, seed, steps):
        """Steps: they advance the state where it lies, and LMDeploy's own stepping changes nothing."""
        random = np.random.default_rng(seed)
        for _ in range(steps):
            self.batch.step(random)
            self.inputs.step_decode(self.inputs.model_inputs, None, None, None, None, None, None)

    def check_inputs(self, inputs, pages, bound):
        """What LMDeploy looks at before a decode step."""
        running = [life for life in self.batch.lives if life.alive]
        assert inputs.is_decoding and inputs.input_ids.shape == (1, len(self.batch.lives) * self.length)
        assert inputs.block_offsets.tolist() == pages.tolist()
        assert inputs.max_kv_seqlen == bound and inputs.max_q_seqlen == self.length
        alive = torch.tensor([life.alive for life in self.batch.lives], dtype=torch.bool)
        assert inputs.history_lengths[alive].tolist() == [life.history for life in running]
        assert inputs.input_ids.view(-1, self.length)[alive].tolist() == [life.ids for life in running]

    @invariant()
    def batch_is_the_requests(self):
        """Every row, in order."""
        self.batch.check()
        assert self.inputs.joined == self.joined
        own = self.inputs.state.own[:self.inputs.state.count].tolist()
        assert own == [[blocks.ALPHA, life.threshold] for life in self.batch.lives]


# 100 interleavings of 15 events, of which many are several steps. Red when: a row of state goes with another request, a
# prefilled one starts with anything but fresh state, a block that the prompt fills is denoised again, the text of a
# request moves on too early or too late, a step advances twice, the bound of the keys is lost, or a threshold is not
# its own request's.
TestBatch = Batch.TestCase
TestBatch.settings = settings(max_examples=100, stateful_step_count=15, deadline=None, derandomize=True)


def test_a_report_on_the_host():
    """Red when: LMDeploy is told another column of the report, or a mask in other values than its own."""
    length = 4
    report = torch.zeros(2, report_width(length), dtype=torch.int64)
    report[0] = torch.tensor([5, 6, 7, 8, 0b1010, 0, 3, 2, 6, 5, 1, 1])
    report[1] = torch.tensor([1, 2, 3, 4, 0, 1, -1, 0, 0, 0, 0, 0])
    outputs = FocusBatchedOutputs.of_report(report, length, dense=True).to_cpu()
    assert outputs.next_token_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert (outputs.stopped.tolist(), outputs.stop_pos.tolist()) == ([False, True], [3, -1])
    extra = outputs.extra_outputs
    assert extra.dllm_mask.tolist() == [oracle.UNMASKED, oracle.MASKED] * 2 + [oracle.UNMASKED] * 4
    assert extra.dllm_mask.dtype == torch.uint8
    assert [value.tolist() for value in (extra.decoded, extra.prefix_rows, extra.suffix_rows, extra.evicting,
                                         extra.ran, extra.dense)] == [[2, 0], [6, 0], [5, 0], *[[True, False]] * 3]
