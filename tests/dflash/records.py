"""The drafts of each step, recorded as an engine verifies them: a measure that does not depend on what is tested.

A drafted token was accepted when the whole draft up to it is what the finished answer goes on with.
"""

from lmdeploy.pytorch.messages import MessageStatus

from lmdeploy_focus import run_stats
from lmdeploy_focus.dflash.acceptance import Acceptance

GREEDY = {'do_sample': False, 'max_new_tokens': 48}
QUESTION = 'Tom has 3 apples and buys 5 more. How many apples does he have?'


class Records:
    """The drafts that an engine verified, by session."""

    def __init__(self):
        self.waiting, self.verified, self.answers = {}, {}, {}

    def before(self, running, decoding):
        for seq in running:
            if decoding and seq.status == MessageStatus.RUNNING:
                self.verified.setdefault(seq.session_id, []).append(self.waiting[seq.session_id])

    def after(self, outputs, running):
        drafts = outputs.extra_outputs.draft_token_ids.tolist()
        for seq, draft in zip(running, drafts, strict=True):
            self.waiting[seq.session_id] = seq.num_new_tokens, draft
            self.answers[seq.session_id] = seq.generated_ids.tolist()

    def acceptance(self, session, delivered=None):
        """Steps by accepted tokens of one session; of its first `delivered` tokens, which end with a step."""
        answer, steps = self.answers[session][:delivered], [0] * 16
        for begin, draft in self.verified.get(session, []):
            if begin < len(answer):
                pairs = zip(draft, answer[begin:], strict=False)
                steps[next((place for place, (a, b) in enumerate(pairs) if a != b),
                           min(len(draft), len(answer) - begin))] += 1
        return Acceptance(tuple(steps))

    def total(self):
        """Accepted and rejected tokens of all sessions."""
        every = [self.acceptance(session) for session in self.answers]
        accepted = sum(place * steps for one in every for place, steps in enumerate(one.steps_by_accepted))
        return accepted, 15 * sum(sum(one.steps_by_accepted) for one in every) - accepted


def delta(pipe, before):
    """What `run_stats` counted since `before`."""
    return {name: value - before[name] for name, value in run_stats(pipe).items()}


def inside_a_run(records):
    """(prompt's place, token) for a drafted and accepted token that is followed by another, and new in its answer."""
    for place, (session, answer) in enumerate(sorted(records.answers.items())):
        for begin, draft in records.verified[session]:
            if draft[:4] == answer[begin:begin + 4] and answer.index(answer[begin + 1]) == begin + 1:
                return place, answer[begin + 1]
    raise AssertionError('no such token')
