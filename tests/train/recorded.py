"""Runs whose attempts are written down, which overflow, or which end at a chosen instant."""

import os
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from unittest import mock

from megamix.launch.exit_status import PreemptedError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.batch_plan import Attempt, BatchPlan, StepOutcome
from tests.builders import run_on_ranks


@dataclass
class Record:
    """Attempts and samples of a run."""

    attempts: list[Attempt] = field(default_factory=list)  # as launched
    applied: list[Attempt] = field(default_factory=list)  # as applied
    valid_loss: float | None = None

    def samples(self):
        """Return the samples of all applied updates, in order."""
        return [sample for attempt in self.applied for part in attempt.batch.samples for sample in part]


def run_recorded(
    config, bad_attempts=frozenset(), bad_samples=frozenset(), *, crash_at=None, leave_at=None, before=lambda plan: None
):
    """Run a job that overflows at some attempts and wherever some samples are, to its end, or until it crashes or is
    asked to leave before an attempt.

    The overflow is in the loss of one rank, another one each time. `before`: called before each attempt.
    """
    record = Record()

    def end_early(plan):
        before(plan)
        if plan.launched == crash_at:
            raise Crash
        if plan.launched == leave_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        crash_contained(),
        suppress(PreemptedError) if leave_at is not None else nullcontext(),
        attempts_recorded(record, end_early),
        overflows_injected(record, bad_attempts, bad_samples),
    ):
        record.valid_loss = run_on_ranks(config)
    return record


@contextmanager
def attempts_recorded(record, before=lambda plan: None):
    """Write down the attempts that the plan hands out and those applied.

    `before`: called before each attempt is taken.
    """
    launch, settle = BatchPlan.launch, BatchPlan.settle

    def recorded_launch(plan):
        before(plan)
        record.attempts.append(launch(plan))
        return record.attempts[-1]

    def recorded_settle(plan, found_inf, loss_scale):
        attempt, fate = plan.oldest(), settle(plan, found_inf, loss_scale)
        if fate is StepOutcome.APPLIED:
            record.applied.append(attempt)
        return fate

    with (
        mock.patch.object(BatchPlan, "launch", recorded_launch),
        mock.patch.object(BatchPlan, "settle", recorded_settle),
    ):
        yield


class Crash(BaseException):
    """Exception that no handler expects."""


@contextmanager
def crash_contained():
    """Let a Crash in the block end the job.

    In a process of its own it would also end a save and a mirror that are under way. Here they would write beside the
    next start, so they are waited for.
    """
    with suppress(Crash):
        yield
    for thread in threading.enumerate():
        if thread.name in ("checkpoint", "mirror"):
            thread.join()


@contextmanager
def overflows_injected(record, bad_attempts, bad_samples):
    backward = ShardedEngine.backward

    def poisoned(engine, loss, weight=1.0):
        if not record.attempts:  # the loss scale's probe
            backward(engine, loss, weight)
            return
        number, batch = record.attempts[-1]
        bad = number in bad_attempts or any(sample in part for sample in bad_samples for part in batch.samples)
        topology = engine.topology
        mine = number % topology.dp.size == topology.dp.rank
        backward(engine, loss * float("inf") if bad and mine else loss, weight)

    with mock.patch.object(ShardedEngine, "backward", poisoned):
        yield


@contextmanager
def counted_calls(at_call):
    """Call `at_call(n)` at the n-th call, of Python or C, in this thread: an instant that depends on no clock."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if event in ("call", "c_call"):
            at_call(calls)
            calls += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
