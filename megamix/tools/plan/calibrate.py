"""Constants of the time model from runs of one's own: least squares, whose priors are the constants before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from megamix.tools.plan.ridge import Vector, inverse, ridge
from megamix.tools.plan.time_constants import FittedConstants, TimeConstants
from megamix.tools.plan.time_hardware import Hardware
from megamix.tools.plan.time_model import StepTime, step_time
from megamix.tools.plan.time_work import TimedJob

STEP_ERROR, PART_ERROR = 0.02, 0.05  # relative, of a median over a run
UNPROVEN_FACTOR = 5  # of the constants' errors on machines whose kind no published row covers
COMPUTING = ("products", "attention", "between", "recompute", "tp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Median seconds of a run's steps, and of their parts that a log tells."""

    job: TimedJob
    hardware: Hardware
    seconds: float
    computing: float  # forward and backward, without waits
    update: float


def measured_step(metrics: Path, job: TimedJob, hardware: Hardware) -> MeasuredStep:
    """Return the median step of a run, from its metrics.jsonl. The first interval is left out: it compiles.

    Raises: ValueError if the file has fewer than two intervals.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get("throughput/tokens_per_s")][1:]
    if not rows:
        raise ValueError(f"{metrics}: got fewer than 2 rows with throughput/tokens_per_s; train for longer")
    seconds = job.step_tokens / median(row["throughput/tokens_per_s"] for row in rows)
    shares = [median(row[f"time_share/{part}"] for row in rows) for part in ("forward_backward", "update")]
    return MeasuredStep(job, hardware, seconds, *(share * seconds for share in shares))


def calibrate(steps: Sequence[MeasuredStep], constants: FittedConstants) -> FittedConstants:
    """Return the constants that explain the measured steps, too."""
    measured = np.log([[step.seconds, step.computing, step.update] for step in steps]).ravel()
    errors = np.tile([STEP_ERROR, PART_ERROR, PART_ERROR], len(steps))

    def predict(logs: Vector) -> Vector:
        values = TimeConstants.of(logs)
        times = [step_time(step.job, step.hardware, values) for step in steps]
        return np.log([[time.seconds, _computing(time), time.parts["update"]] for time in times]).ravel()

    factor = 1 if all(step.hardware.proven for step in steps) else UNPROVEN_FACTOR
    fit = ridge(predict, measured, errors, constants.logs, inverse(factor**2 * constants.covariance))
    return FittedConstants(TimeConstants.of(fit.logs), fit.covariance)


def _computing(time: StepTime) -> float:
    return sum(time.parts[part] for part in COMPUTING)
