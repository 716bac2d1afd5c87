"""Every batch is applied once or set aside, in an order that only the steps' outcomes decide; a stopped plan continues
as if it had never stopped.
"""

import random

import pytest

from megamix.train.batch_plan import BatchPlan, GlobalBatch, PlanState, StepOutcome, WaitingBatch


class Run:
    """Driver of a plan, as the trainer; the scale halves at an overflow and doubles after `growth` clean attempts."""

    def __init__(self, plan, overflows, scale=2.0**16, growth=10**9):
        self.plan, self.overflows, self.scale, self.growth = plan, overflows, scale, growth
        self.clean = 0
        self.outcomes = {}
        self.tried = []
        self.applied = []  # samples, in the order applied
        self.fates = []  # first sample of the batch

    def to(self, stop):
        while True:
            while self.plan.must_settle(until=stop):
                self._settle()
            if self.plan.applied == stop:
                return self
            attempt = self.plan.launch()
            found_inf = self.overflows(attempt)
            self.tried.append(attempt)
            self.outcomes[attempt.number] = (found_inf, self.scale)
            self.clean = 0 if found_inf else self.clean + 1
            if found_inf:
                self.scale /= 2
            elif self.clean % self.growth == 0:
                self.scale *= 2

    def _settle(self):
        attempt = self.plan.oldest()
        fate = self.plan.settle(*self.outcomes[attempt.number])
        self.fates.append((attempt.batch.samples[0].start, fate))
        if fate is StepOutcome.APPLIED:
            self.applied += [sample for part in attempt.batch.samples for sample in part]


def _waiting(samples, due_in):
    return WaitingBatch.of(GlobalBatch((samples,), 1), due_in)


def _at(*numbers):
    return lambda attempt: attempt.number in numbers


@pytest.mark.parametrize(
    ("on_overflow", "bad", "tried", "applied"),
    [
        ("requeue", (1, 3), [0, 1, 2, 1, 3, 1, 4, 5], [0, 2, 3, 1, 4, 5]),  # two attempts later
        ("redo", (1, 2), [0, 1, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),  # at once
        ("skip", (1,), [0, 1, 2, 3, 4], [0, 2, 3, 4]),
        ("requeue", (2, 3), [0, 1, 2, 2, 2], [0, 1, 2]),  # at the very end no batch beyond the first n starts
    ],
)
def test_a_batch_that_overflowed_comes_again_or_is_lost_as_configured(on_overflow, bad, tried, applied):
    run = Run(BatchPlan(len(applied), 1, on_overflow, 3), _at(*bad)).to(len(applied))
    assert [attempt.batch.samples[0].start for attempt in run.tried] == tried
    assert run.applied == applied
    assert ((1, StepOutcome.LOST) in run.fates) is (on_overflow == "skip")


@pytest.mark.parametrize("on_overflow", ["requeue", "redo"])
@pytest.mark.parametrize("seed", range(20))
def test_n_updates_apply_exactly_the_first_n_batches(on_overflow, seed):
    rng = random.Random(seed)
    bad = {number for number in range(400) if rng.random() < rng.choice([0.02, 0.3])}
    # An endless downward search counts no try, so nothing is set aside.
    run = Run(BatchPlan(100, 4, on_overflow, 10**6), _at(*bad))
    for stop in [*sorted(rng.sample(range(1, 100), 5)), 100]:
        run.to(stop)
        assert run.plan.state().applied == stop  # nothing is in flight: the weights are those of update `stop`
    assert sorted(run.applied) == list(range(400))


@pytest.mark.parametrize("seed", range(20))
def test_a_run_stopped_anywhere_goes_on_as_if_never_stopped(seed):
    rng = random.Random(seed)
    bad = {number for number in range(400) if rng.random() < 0.3}
    stop = rng.randrange(1, 60)
    settings = 60, 2, rng.choice(["requeue", "redo", "skip"]), rng.choice([0, 1, 3])
    whole = Run(BatchPlan(*settings), _at(*bad)).to(stop)
    launched, scale = len(whole.tried), whole.scale
    state = whole.plan.state()
    whole.to(60)
    rest = Run(BatchPlan(*settings, state=state), lambda attempt: attempt.number in bad, scale).to(60)
    assert [attempt.batch for attempt in rest.tried] == [attempt.batch for attempt in whole.tried[launched:]]
    assert rest.plan.state() == whole.plan.state()


def test_after_a_change_of_batch_size_waiting_samples_come_first_and_in_order():
    waiting = (_waiting(range(8, 12), 1), _waiting(range(0, 4), 2))
    state = PlanState(applied=2, cursor=20, waiting=waiting, last_applied_scale=1.0)
    run = Run(BatchPlan(8, 3, "requeue", 3, state), _at(1)).to(8)
    batches = [attempt.batch.samples for attempt in run.tried]
    assert batches[:4] == [
        (range(8, 11),),
        (range(11, 12), range(0, 2)),
        (range(2, 4), range(20, 21)),
        (range(11, 12), range(0, 2)),
    ]
    assert sorted(run.applied) == [*range(4), *range(8, 12), *range(20, 30)]


def test_what_is_left_over_of_another_batch_size_survives_a_stop():
    state = PlanState(cursor=10, waiting=(_waiting(range(0, 10), 0),), last_applied_scale=1.0)
    first = Run(BatchPlan(9, 4, "requeue", 3, state), _at()).to(1)
    second = Run(BatchPlan(9, 4, "requeue", 3, first.plan.state()), _at()).to(9)
    assert first.applied + second.applied == list(range(36))


def test_a_growth_that_was_too_much_does_not_count():
    run = Run(BatchPlan(40, 1, "requeue", 0), _at(), growth=5)
    run.overflows = lambda attempt: run.scale > 2.0**16
    run.to(40)
    assert sorted(run.applied) == list(range(40))
    assert [fate for _, fate in run.fates].count(StepOutcome.REQUEUED) > 3


@pytest.mark.parametrize("on_overflow", ["requeue", "redo"])
@pytest.mark.parametrize("max_retries", [0, 3])
def test_batches_that_overflow_at_scales_that_worked_are_set_aside_and_cannot_excuse_each_other(
    on_overflow, max_retries
):
    bad = (2, 3)
    run = Run(BatchPlan(10, 1, on_overflow, max_retries), lambda attempt: attempt.batch.samples[0].start in bad).to(10)
    for number in bad:
        fates = [fate for first, fate in run.fates if first == number]
        assert fates == [StepOutcome.REQUEUED] * max_retries + [StepOutcome.SET_ASIDE]
    assert sorted(run.applied) == [0, 1, *range(4, 12)]
