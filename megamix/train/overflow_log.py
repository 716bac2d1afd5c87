"""What the host does about overflows: say which batch it was and what becomes of it, keep what was set aside, and
stop the run once the budget is spent.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from megamix.config import Config
from megamix.data.durable import append_line
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.batch_plan import Attempt, Fate, GlobalBatch
from megamix.train.console import Console
from megamix.train.metrics import MetricsWriter, format_scale
from megamix.train.overflow_budget import GaveUpError, OverflowBudget
from megamix.train.readout import Outcome

SET_ASIDE = "set_aside.jsonl"


class OverflowLog:
    """Takes every attempt's outcome, in order, on every rank; the first one speaks and writes."""

    def __init__(self, config: Config, engine: ShardedEngine, console: Console, writer: MetricsWriter | None):
        self.count = 0  # attempts that overflowed
        self._config, self._engine, self._console, self._writer = config, engine, console, writer
        self._budget = OverflowBudget(config.precision)
        self._scales: deque[list[float]] = deque(maxlen=64)  # [loss scale, attempts, overflows] while it stayed

    def note(self, attempt: Attempt, outcome: Outcome, fate: Fate, applied: int) -> None:
        """Raises: GaveUpError once the budget is spent, on every rank at the same attempt."""
        if not self._scales or self._scales[-1][0] != outcome.loss_scale:
            self._scales.append([outcome.loss_scale, 0, 0])
        self._scales[-1][1] += 1
        self._scales[-1][2] += outcome.found_inf
        if outcome.found_inf:
            self.count += 1
            self._say(attempt, outcome, fate, applied)
            if fate is Fate.SET_ASIDE and self._writer is not None:
                self._set_aside(attempt, outcome, applied)
        at_floor = outcome.loss_scale <= self._engine.loss_scale.min_scale
        reason = self._budget.spend(outcome.found_inf, at_floor)
        if reason is not None:
            raise GaveUpError(self._diagnosis(reason, attempt, applied))

    def _say(self, attempt: Attempt, outcome: Outcome, fate: Fate, applied: int) -> None:
        self._console.line(
            f"step {applied + 1}/{self._config.training.steps} | overflow at loss_scale "
            f"{format_scale(outcome.loss_scale)}, nothing changed: samples {format_samples(attempt.batch)} "
            f"{fate.value} | skipped {self.count}"
        )
        if self._writer is not None:
            self._writer.write(applied + 1, {"loss_scale": outcome.loss_scale, "skipped_steps": self.count})

    def _diagnosis(self, reason: str, attempt: Attempt, applied: int) -> str:
        scales = ", ".join(
            f"{format_scale(scale)}: {overflows:.0f} of {attempts:.0f}" for scale, attempts, overflows in self._scales
        )
        return (
            f"gave up after {attempt.number + 1} attempts and {applied} updates: {reason}\n"
            f"loss scales, with overflows of attempts: {scales}"
        )

    def _set_aside(self, attempt: Attempt, outcome: Outcome, applied: int) -> None:
        row = {
            "step": applied + 1,
            "samples": [[part.start, len(part)] for part in attempt.batch.samples],
            "tries": attempt.batch.tries + 1,
            "loss_scale": outcome.loss_scale,
        }
        append_line(Path(self._config.checkpoint.folder) / SET_ASIDE, json.dumps(row))


def format_samples(batch: GlobalBatch) -> str:
    return ", ".join(f"{part.start}..{part.stop - 1}" for part in batch.samples)
