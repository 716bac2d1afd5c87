"""Where a run stands besides its weights: what a checkpoint keeps of it, as plain JSON that is checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megamix.train.batch_plan import GlobalBatch, PlanState, Waiting

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WaitingBatch(_Record):
    """A batch that is to be tried again; see batch_plan.Waiting."""

    samples: tuple[tuple[_Count, _Count], ...]  # (first, how many) of each range
    tries: _Count
    counted_tries: _Count
    due_in: Annotated[int, Field(ge=-(2**53), le=2**53)]


class Progress(_Record):
    """Between two updates, with nothing in flight."""

    applied: _Count = 0
    attempts: _Count = 0
    cursor: _Count = 0  # the first sample never tried
    waiting: tuple[WaitingBatch, ...] = ()
    last_applied_scale: float | None = None
    skipped: _Count = 0  # attempts that overflowed
    interval_losses: tuple[str, ...] = ()  # of the log interval so far, as float.hex
    validated: _Count = 0  # the update after which the last validation was
    log_sizes: dict[str, _Count] = {}  # bytes, by file name: what is behind them was written after this

    @staticmethod
    def read(values: Mapping[str, Any]) -> Progress:
        """Raises: ValueError naming the field."""
        try:
            return Progress.model_validate_json(json.dumps(values))  # in JSON a tuple is a list
        except ValidationError as error:
            raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None

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
