"""The acceptance length: that of a decoding in which the target verifies every block."""
import torch

from scripts.dflash_training.acceptance import _replay, measure
from scripts.dflash_training.layout import load_draft
from scripts.dflash_training.prompts import Encoder, Sample


def test_it_is_the_reference_decoders(target, facts, demo):
    """Red when tokens or steps are counted in another way than by decoding: the first token of the answer, the target's
    own token, what lies behind a stop token, the last block's overrun, a sequence that ends before the others."""
    from eval.demo_models.checkpoint import load_decoder
    from eval.demo_models.checkpoint import load_draft as load_reference
    from eval.demo_models.reference_dflash import decode_dflash
    from eval.demo_models.tasks import eval_set
    max_new, batch = 28, 2
    prompts = [Encoder(facts[1], True, 4096).prompt({'prompt': item.prompt}, '') for item in eval_set(None, 1)[1:]]
    reference = decode_dflash(load_decoder(demo / 'ar'), load_reference(demo / 'dflash'), prompts, max_new)
    answers = target.answer(prompts, max_new + 16, None, 0)
    draft, mask = load_draft(demo / 'dflash', 'ar', target.plan, 'cpu')
    samples = [Sample(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    found = measure(target, draft, samples, mask, max_new, batch)
    assert (found.tokens, found.steps) == (sum(a.verified for a in reference), sum(a.steps for a in reference))
    assert len(found.accepted) == 15 and list(found.accepted) == sorted(found.accepted, reverse=True)


class Perfect:
    """A context whose drafter knows the answers, or nothing."""

    def __init__(self, answers, size, right):
        self.answers, self.right = answers, right
        self.target = type('T', (), {'device': 'cpu'})
        self.draft = type('D', (), {'block_length': size})

    def keep(self, rows):
        self.answers = [self.answers[row] for row in rows.tolist()]

    def propose(self, tokens, anchors, mask_token):
        size = self.draft.block_length - 1
        if not self.right:
            return torch.full((len(tokens), size), 5)
        rows = [(*answer[anchor - 1:], *[0] * size)[:size] for answer, anchor in
                zip(self.answers, anchors.tolist(), strict=True)]
        return torch.tensor(rows)


def test_by_hand():
    """Red when a wrong draft gives no token, a right one not all of its block and the target's own, or an answer's end
    is overrun. Prompts are two tokens long, so the answer's token n is at position n + 2."""
    answers = [(11, 12, 13, 14, 15, 16, 17, 2), (21, 22, 2)]
    samples = [Sample((1, 1), answer) for answer in answers]
    assert sorted(_replay(Perfect(answers, 4, False), samples, 3, 99)) == [(1, 0)] * 9
    assert sorted(_replay(Perfect(answers, 4, True), samples, 3, 99)) == [(2, 2), (3, 3), (4, 3)]
    # Known after the prompt and a full block: five tokens, of which three were wanted.
    assert _replay(Perfect(answers[:1], 4, True), samples[:1], 3, 3) == [(4, 3)]
