"""Where a run stands besides its weights: what a checkpoint keeps of it, as plain JSON that is checked when read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megamix.checkpoint.record import Count, Record
from megamix.train.batch_plan import GlobalBatch, PlanState, Waiting, check_state
from megamix.train.run_folder import METRICS, SET_ASIDE


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

    def check(self, applied: int, skipped: int, global_batch_size: int) -> None:
        """Refuse what no run can have saved beside the engine's counters.

        Raises: ValueError naming the field.
        """
        if (self.applied, self.skipped) != (applied, skipped):
            raise ValueError(
                f"{self.applied} applied and {self.skipped} skipped, the engine's are {applied}, {skipped}"
            )
        check_state(self.plan(), self.skipped, global_batch_size)
        if self.validated > self.applied:
            raise ValueError(f"validated is {self.validated}, after update {self.applied}")
        # The first update's line ends an interval, so that one is in none.
        if len(self.interval_losses) > max(self.applied - 1, 0) or not all(map(_is_loss, self.interval_losses)):
            raise ValueError("interval_losses: not the losses of updates since the last line")
        if not set(self.log_sizes) <= {METRICS, SET_ASIDE}:
            raise ValueError(f"log_sizes: the logs are {METRICS} and {SET_ASIDE}")


def _is_loss(text: str) -> bool:
    """Whether it is what `hex` writes of a finite FP32 number: a finite gradient has a finite loss."""
    try:
        loss = float.fromhex(text)
        return loss.hex() == text and math.isfinite(loss) and struct.unpack("f", struct.pack("f", loss))[0] == loss
    except (ValueError, OverflowError):
        return False


def _to_record(waiting: Waiting) -> WaitingBatch:
    batch = waiting.batch
    return WaitingBatch(
        samples=tuple((part.start, len(part)) for part in batch.samples),
        tries=batch.tries, counted_tries=batch.counted_tries, due_in=waiting.due_in,
    )  # fmt: skip


def _from_record(record: WaitingBatch) -> Waiting:
    samples = tuple(range(start, start + length) for start, length in record.samples)
    return Waiting(GlobalBatch(samples, record.tries, record.counted_tries), record.due_in)
