"""Where a run stands besides its weights: what a checkpoint keeps of it, as plain JSON that is checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megamix.checkpoint.record import Count, Record
from megamix.train.batch_plan import GlobalBatch, PlanState, Waiting


class WaitingBatch(Record):
    """A batch that is to be tried again; see batch_plan.Waiting."""

    samples: tuple[tuple[Count, Count], ...]  # (first, how many) of each range
    tries: Count
    counted_tries: Count
    due_in: Annotated[int, Field(ge=-(2**53), le=2**53)]


class Progress(Record):
    """Between two updates, with nothing in flight."""

    applied: Count = 0
    attempts: Count = 0
    cursor: Count = 0  # the first sample never tried
    waiting: tuple[WaitingBatch, ...] = ()
    last_applied_scale: float | None = None
    skipped: Count = 0  # attempts that overflowed
    interval_losses: tuple[str, ...] = ()  # of the log interval so far, as float.hex
    validated: Count = 0  # the update after which the last validation was
    log_sizes: dict[str, Count] = Field(default_factory=dict)  # bytes, by file name; what lies behind came later

    @staticmethod
    def read(values: Mapping[str, Any]) -> Progress:
        """Raises: ValueError naming the field."""
        return Progress.from_json(json.dumps(values))  # in JSON a tuple is a list

    @staticmethod
    def of(plan: PlanState, losses: list[float], skipped: int, validated: int, log_sizes: dict[str, int]) -> Progress:
        return Progress(
            applied=plan.applied,
            attempts=plan.attempts,
            cursor=plan.cursor,
            waiting=tuple(_to_record(waiting) for waiting in plan.waiting),
            last_applied_scale=plan.last_applied_scale,
            skipped=skipped,
            interval_losses=tuple(loss.hex() for loss in losses),
            validated=validated,
            log_sizes=log_sizes,
        )

    def plan(self) -> PlanState:
        waiting = tuple(_from_record(record) for record in self.waiting)
        return PlanState(self.applied, self.cursor, waiting, self.last_applied_scale, self.attempts)

    def losses(self) -> list[float]:
        return [float.fromhex(text) for text in self.interval_losses]


def _to_record(waiting: Waiting) -> WaitingBatch:
    batch = waiting.batch
    return WaitingBatch(
        samples=tuple((part.start, len(part)) for part in batch.samples),
        tries=batch.tries, counted_tries=batch.counted_tries, due_in=waiting.due_in,
    )  # fmt: skip


def _from_record(record: WaitingBatch) -> Waiting:
    samples = tuple(range(start, start + length) for start, length in record.samples)
    return Waiting(GlobalBatch(samples, record.tries, record.counted_tries), record.due_in)
