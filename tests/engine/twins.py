"""Watches the kernels of a runner: each decision is made once more by its twin, on copies of its inputs on the CPU."""
from collections import Counter
from contextlib import contextmanager
from dataclasses import fields, replace

import torch
from lmdeploy_focus.kernels import reference_enter, reference_plan, reference_settle
from lmdeploy_focus.kernels.layout import TURNS, Pace, Plan, report_columns, state_columns

# columns whose length is the number of sequences, or that of a limit: of rows that enter, are kept, are sampled
PER_SEQUENCE = ('start', 'current', 'pending', 'candidates', 'rightmost', 'sampled_start')
SAMPLED = ('sampled', 'sampled_sequence', 'sampled_position')


def copied(value):
    """On the CPU, apart from what it was copied of."""
    if isinstance(value, torch.Tensor):
        return value.detach().to('cpu', copy=True)
    if isinstance(value, Pace):
        return Pace(copied(value.limits), copied(value.turn), value.totals.clone())
    if hasattr(value, 'start'):
        return replace(value, **{field.name: copied(getattr(value, field.name)) for field in fields(value)})
    return value


class Checked:
    """Kernels of a runner beside their twins.

    Attributes:
        differences: what was not the same, by call.
        seen: how many calls, and steps that evicted, committed a block or ended a sequence.
    """

    def __init__(self, runner, device):
        self.kernels, self.device = runner.model.kernels, device
        self.differences, self.seen = [], Counter()

    @contextmanager
    def watching(self):
        """While this is open, every call is checked."""
        original = dict(vars(self.kernels))
        for name in ('enter', 'plan', 'settle'):
            setattr(self.kernels, name, self._checked(name, original[name]))
        try:
            yield
        finally:
            vars(self.kernels).update(original)

    def _checked(self, name, run):
        twin = {'enter': reference_enter.enter, 'plan': reference_plan.plan, 'settle': reference_settle.settle}[name]

        def call(*args, **kwargs):
            self._synchronize()
            inputs = [copied(value) for value in args]
            options = {key: copied(value) for key, value in kwargs.items() if key not in ('out', 'report')}
            result = run(*args, **kwargs)
            self._synchronize()
            # an exception in the engine's thread would end the engine, not the test
            try:
                getattr(self, f'_{name}')(args, copied(result), inputs, options, twin)
            except Exception as error:
                self.differences.append((name, self.seen[name], repr(error)))
            self.seen[name] += 1
            return result

        return call

    def _synchronize(self):
        if self.device == 'cuda':
            torch.cuda.synchronize()

    def _differ(self, name, what, mine, its):
        if not torch.equal(mine, its):
            where = (mine != its).nonzero()[:3].tolist()
            self.differences.append((name, self.seen[name], what, where))

    def _same_rows(self, name, mine, its, limits):
        for field in fields(its):
            a, b = getattr(mine, field.name), getattr(its, field.name)
            if field.name not in PER_SEQUENCE:
                bound = min(int(limits[-1 if field.name in SAMPLED else 0]), len(a), len(b))
                # a twin without `out` has as many rows as there may be, the engine as many as its largest bucket
                a, b = a[:bound], b[:bound]
            self._differ(name, field.name, a, b)

    def _same_totals(self, name, pace, expected, columns):
        row = int(expected.turn) % TURNS
        self._differ(name, 'totals', pace.totals[row, columns].clone(), expected.totals[row, columns])

    def _enter(self, args, result, inputs, options, twin):
        table, _, _, pace, length = inputs[:5]
        out = type(result).empty(len(table), length, len(result.sequence), 'cpu')
        expected = twin(*inputs, **options, out=out)
        self._same_rows('enter', result, expected, pace.limits[:1])
        self._same_totals('enter', args[3], pace, [0, 3])
        self.seen['committing'] += bool(result.pending.any())

    def _plan(self, args, result, inputs, options, twin):
        _, _, table, entered, pace, length = inputs[:6]
        out = Plan.empty(len(table), length, len(result.sequence), 'cpu')
        expected = twin(*inputs, **options, out=out)
        self._same_rows('plan', result, expected, pace.limits[1:])
        self._same_totals('plan', args[4], pace, [1, 2, 3])
        self.seen['evicting'] += bool((result.current != entered.current).any())

    def _settle(self, args, report, inputs, options, twin):
        table, _, _, pace = inputs[:4]
        length = inputs[8]
        expected = twin(*inputs, **options)
        self._differ('settle', 'report', report, expected)
        told = report_columns(expected, length)
        # of a sequence that has stopped the state says only that
        going, mine = told.stopped == 0, copied(args[0])
        self._differ('settle', 'state', mine[going], table[going])
        self._differ('settle', 'alive', state_columns(mine, length).alive, state_columns(table, length).alive)
        self._differ('settle', 'turn', copied(args[3].turn), pace.turn)
        self.seen['stopping'] += bool(told.stopped.any())
