"""The order in which batches are tried. Each batch is applied once, or lost, or set aside, and all ranks decide alike.

An attempt is one step on one global batch. An attempt that overflows changes no weight. The host numbers the attempts,
and learns of each outcome a fixed number of attempts later, so nothing here depends on timing.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megamix.checkpoint.manifest import Record
from megamix.data.sampler import Samples, cut, num_samples

OnOverflow = Literal["requeue", "redo", "skip"]

# Number of attempts from the launch of one until its outcome is known. "redo" waits for each outcome before it goes on.
# The other two keep a whole attempt queued on the device while the host waits for an older one.
LAGS: dict[OnOverflow, int] = {"requeue": 2, "redo": 1, "skip": 2}


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The sample numbers of one update, and the number of attempts with them that have overflowed."""

    samples: Samples
    tries: int = 0
    counted_tries: int = 0  # tries that count against max_retries

    def __str__(self) -> str:
        return ", ".join(f"{part.start}..{part.stop - 1}" for part in self.samples)


class Attempt(NamedTuple):
    number: int  # 0 for the first of the run
    batch: GlobalBatch


class StepOutcome(enum.Enum):
    """The outcome of an attempt."""

    APPLIED = "applied"
    REQUEUED = "come again"
    LOST = "lost"  # on_overflow = "skip"
    SET_ASIDE = "set aside"  # overflowed too often


class WaitingBatch(Record):
    """A batch that overflowed, and the number of attempts until it is tried again."""

    samples: tuple[tuple[int, int], ...]  # (first, length) of each range
    tries: int
    counted_tries: int
    due_in: int

    @staticmethod
    def of(batch: GlobalBatch, due_in: int) -> WaitingBatch:
        samples = tuple((part.start, len(part)) for part in batch.samples)
        return WaitingBatch(samples=samples, tries=batch.tries, counted_tries=batch.counted_tries, due_in=due_in)

    @property
    def batch(self) -> GlobalBatch:
        samples = tuple(range(start, start + length) for start, length in self.samples)
        return GlobalBatch(samples, self.tries, self.counted_tries)


class PlanState(Record):
    """The state of the plan between updates, when no attempt is in flight."""

    applied: int = 0
    attempts: int = 0  # attempts handed out so far
    cursor: int = 0  # the first sample that was never tried
    waiting: tuple[WaitingBatch, ...] = ()
    last_applied_scale: float | None = None

    def counters(self) -> dict[str, float | list[int]]:
        """Return the whole state as numbers, by name. If they differ between ranks, memory is damaged."""
        waiting = [
            number
            for item in self.waiting
            for start, length in item.samples
            for number in (item.due_in, item.tries, item.counted_tries, start, start + length)
        ]
        return {
            "plan.applied": self.applied, "plan.cursor": self.cursor, "plan.waiting": waiting,
            "plan.attempts": self.attempts, "plan.last_applied_scale": self.last_applied_scale or 0.0,
        }  # fmt: skip


class BatchPlan:
    """Hands out the attempts, and takes their outcomes in the same order.

    `updates`: number of updates of the whole run. `applied`: number of updates so far.
    """

    def __init__(
        self,
        updates: int,
        global_batch_size: int,
        on_overflow: OnOverflow,
        max_retries: int,
        state: PlanState | None = None,
    ):
        self.updates, self.global_batch_size = updates, global_batch_size
        self._on_overflow, self._max_retries, self.lag = on_overflow, max_retries, LAGS[on_overflow]
        state = state or PlanState()
        self.applied, self._cursor, self._last_applied_scale = state.applied, state.cursor, state.last_applied_scale
        self.launched = state.attempts  # attempts handed out
        self._in_flight = deque[Attempt]()
        # Batches that overflowed, each after the number of the attempt at which it is due, in this order.
        self._waiting = deque[tuple[int, GlobalBatch]]()
        self._left_over: Samples = ()  # samples of overflowed batches of another size; they come before new samples
        for item in state.waiting:
            batch = item.batch
            # One that was never tried is the rest of batches of another size.
            if batch.tries and num_samples(batch.samples) == global_batch_size:
                self._waiting.append((self.launched + item.due_in, batch))
            else:
                self._left_over += batch.samples

    def with_batches_of(self, global_batch_size: int) -> BatchPlan:
        """Return the plan of the same run with batches of this size from here on, as a restart cuts them. No attempt
        may be in flight.
        """
        return BatchPlan(self.updates, global_batch_size, self._on_overflow, self._max_retries, self.state())

    def must_settle(self, until: int) -> bool:
        """Return whether the oldest outcome in flight must be known before the next attempt.

        It must if `lag` attempts are in flight, or if the next attempt might become update `until` + 1.
        """
        in_flight = len(self._in_flight)
        return in_flight == self.lag or (in_flight > 0 and self.applied + in_flight >= until)

    def launch(self) -> Attempt:
        """Return the next attempt, which is in flight from now on. It is the first waiting batch if that is due, else a
        new batch.

        If the run's updates may need no new batch any more, the first waiting batch is taken before it is due.
        """
        waiting_is_due = bool(self._waiting) and self._waiting[0][0] <= self.launched
        spoken_for = self.applied + len(self._in_flight) + len(self._waiting)
        if self._waiting and (waiting_is_due or spoken_for >= self.updates):
            batch = self._waiting.popleft()[1]
        else:
            batch = GlobalBatch(self.next_new())
            self._left_over = cut(self._left_over, self.global_batch_size, num_samples(self._left_over))
            self._cursor = max(self._cursor, batch.samples[-1].stop)  # left-over samples lie before the cursor
        attempt = Attempt(self.launched, batch)
        self._in_flight.append(attempt)
        self.launched += 1
        return attempt

    def next_new(self) -> Samples:
        left_over = cut(self._left_over, 0, self.global_batch_size)
        missing = self.global_batch_size - num_samples(left_over)
        return (*left_over, range(self._cursor, self._cursor + missing)) if missing else left_over

    def oldest(self) -> Attempt:
        return self._in_flight[0]

    def settle(self, found_inf: bool, loss_scale: float) -> StepOutcome:
        """Take the outcome of the oldest attempt in flight, and return its fate. `loss_scale`: that of the attempt."""
        number, batch = self._in_flight.popleft()
        if not found_inf:
            self.applied += 1
            self._last_applied_scale = loss_scale
            return StepOutcome.APPLIED
        if self._on_overflow == "skip":
            return StepOutcome.LOST
        # A loss scale that has never worked is itself to blame for an overflow. With a scale that has worked, or a
        # lower scale, the batch is to blame. Only an applied update shows that a scale works.
        counts = self._last_applied_scale is not None and loss_scale <= self._last_applied_scale
        batch = replace(batch, tries=batch.tries + 1, counted_tries=batch.counted_tries + counts)
        if batch.counted_tries > self._max_retries:
            return StepOutcome.SET_ASIDE
        self._waiting.append((number + self.lag, batch))
        return StepOutcome.REQUEUED

    def state(self) -> PlanState:
        """Return the state with which a run goes on as if it had not stopped. No attempt may be in flight."""
        assert not self._in_flight, "outcomes are still to come"
        return self.so_far()

    def so_far(self) -> PlanState:
        """Return the state so far, which must be equal on every rank. Attempts may be in flight."""
        waiting = [WaitingBatch.of(batch, due - self.launched) for due, batch in self._waiting]
        left_over = [WaitingBatch.of(GlobalBatch((part,)), 0) for part in self._left_over]
        return PlanState(
            applied=self.applied,
            attempts=self.launched,
            cursor=self._cursor,
            waiting=(*waiting, *left_over),
            last_applied_scale=self._last_applied_scale,
        )
