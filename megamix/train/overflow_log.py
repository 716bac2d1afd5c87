"""What the host does about overflows: say what overflowed and what becomes of the batch, keep what was set aside, and
stop the run once the budget is spent.
"""

from __future__ import annotations

from collections import deque

from megamix.config import Config
from megamix.diagnosis.overflow_budget import GaveUpError, OverflowBudget
from megamix.diagnosis.overflow_words import cause, culprit_table, culprits, origin_lines, overflow_words
from megamix.mixed_precision.culprits import ParamPeak, gather_origins, gather_peaks
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.step import Examination
from megamix.supervise.console import Console
from megamix.train.batch_plan import Attempt, Fate, GlobalBatch
from megamix.train.metrics import MetricsWriter, format_scale
from megamix.train.report import Outcome

_KEPT = 50  # overflows and scales that the report of a run that gives up looks back on


class OverflowLog:
    """Takes every attempt's outcome, in order, on every rank; the first one speaks and writes."""

    def __init__(self, config: Config, engine: ShardedEngine, console: Console, writer: MetricsWriter | None):
        self.count = 0  # attempts that overflowed
        self._config, self._engine, self._console, self._writer = config, engine, console, writer
        self._budget = OverflowBudget(config.precision)
        self._scales: deque[tuple[float, int, int]] = deque(maxlen=_KEPT)  # loss scale, attempts with it, overflows
        self._peaks: deque[list[ParamPeak]] = deque(maxlen=_KEPT)  # of every overflow
        self._origins: list[str] = []  # of the last examined one

    def note(
        self, attempt: Attempt, outcome: Outcome, fate: Fate, applied: int, examination: Examination | None
    ) -> None:
        """Raises: GaveUpError once the budget is spent, on every rank at the same attempt."""
        self._count_scale(outcome)
        if outcome.found_inf:
            self.count += 1
            self._peaks.append(gather_peaks(self._engine, outcome.by_piece))
            if examination is not None:
                self._origins = origin_lines(self._peaks[-1], gather_origins(self._engine, examination))
            self._say(attempt, outcome, fate, applied)
            if fate is Fate.SET_ASIDE:
                self._set_aside(attempt, outcome, applied)
        at_floor = outcome.loss_scale <= self._engine.loss_scale.min_scale
        reason = self._budget.spend(outcome.found_inf, at_floor)
        if reason is not None:
            raise GaveUpError(self._diagnosis(reason, attempt, outcome, applied))

    def _count_scale(self, outcome: Outcome) -> None:
        attempts, overflows = 0, 0
        if self._scales and self._scales[-1][0] == outcome.loss_scale:
            _, attempts, overflows = self._scales.pop()
        self._scales.append((outcome.loss_scale, attempts + 1, overflows + outcome.found_inf))

    def _say(self, attempt: Attempt, outcome: Outcome, fate: Fate, applied: int) -> None:
        self._console.line(
            f"step {applied + 1}/{self._config.training.steps} | overflow at loss_scale "
            f"{format_scale(outcome.loss_scale)}, nothing changed: {overflow_words(outcome.loss, self._peaks[-1])} | "
            f"samples {format_samples(attempt.batch)} {fate.value} | skipped {self.count}"
        )
        if self._writer is not None:
            self._writer.write(applied + 1, {"loss_scale": outcome.loss_scale, "skipped_steps": self.count})

    def _set_aside(self, attempt: Attempt, outcome: Outcome, applied: int) -> None:
        for line in self._origins:
            self._console.line(f"  {line}")
        if self._writer is not None:
            row = {
                "step": applied + 1,
                "attempt": attempt.number,
                "samples": [[part.start, len(part)] for part in attempt.batch.samples],
                "tries": attempt.batch.tries + 1,
                "loss_scale": outcome.loss_scale,
                "parameters": {peak.name: peak.fault for peak in culprits(self._peaks[-1])},
            }
            self._writer.write_set_aside(row)

    def _diagnosis(self, reason: str, attempt: Attempt, outcome: Outcome, applied: int) -> str:
        sections = {
            "cause of the last overflow": [cause(outcome.loss, self._peaks[-1])],
            f"what overflowed, in the last {len(self._peaks)} overflows": culprit_table(self._peaks),
            "where the last examined one began": self._origins,
            "loss scale: overflows of attempts": [
                f"{format_scale(scale)}: {overflows} of {attempts}" for scale, attempts, overflows in self._scales
            ],
        }
        lines = [f"gave up after {attempt.number + 1} attempts and {applied} updates: {reason}"]
        for title, body in sections.items():
            if body:
                lines += [f"{title}:", *(f"  {line}" for line in body)]
        lines.append("the weights of the last update are saved; nothing that overflowed is in them")
        return "\n".join(lines)


def format_samples(batch: GlobalBatch) -> str:
    return ", ".join(f"{part.start}..{part.stop - 1}" for part in batch.samples)
