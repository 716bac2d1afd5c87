"""Constants of the time model from runs of one's own: least squares, whose priors are the constants before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from megamix.tools.plan.ridge import Vector, ridge
from megamix.tools.plan.time_constants import FittedConstants, TimeConstants
from megamix.tools.plan.time_hardware import Hardware
from megamix.tools.plan.time_model import step_time
from megamix.tools.plan.time_work import TimedJob

STEP_ERROR, PART_ERROR = 0.02, 0.05  # relative, of a median over a run
# Factors on machines whose kind no published row covers: of the constants' errors, up to 1, and of measured steps'.
UNPROVEN_FACTOR, UNPROVEN_STEPS = 5, 3
COMPUTING = ("products", "attention", "between", "recompute", "tp", "cp", "ep")


class MeasuredStep(NamedTuple):
    """Median seconds of a run's steps, and of their largest part that a log tells."""

    job: TimedJob
    hardware: Hardware
    seconds: float
    computing: float  # forward and backward, without waits


def measured_step(metrics: Path, job: TimedJob, hardware: Hardware) -> MeasuredStep:
    """Return the median step of a run, from its metrics.jsonl. The first interval is left out: it compiles.

    Raises: ValueError if the file has fewer than two intervals.
    """
    whole, _, _ = metrics.read_text(encoding="utf-8").rpartition("\n")  # a run may still be writing the last line
    rows = [json.loads(line) for line in whole.splitlines()]
    rows = [row for row in rows if row.get("throughput/tokens_per_s")][1:]
    if not rows:
        raise ValueError(
            f"{metrics}: got fewer than 2 rows with throughput/tokens_per_s, one every "
            "metrics.log_interval updates, of which the first is left out; train for longer"
        )
    seconds = job.step_tokens / median(row["throughput/tokens_per_s"] for row in rows)
    share = median(row["time_share/forward_backward"] for row in rows)
    return MeasuredStep(job, hardware, seconds, share * seconds)


def calibrate(steps: Sequence[MeasuredStep], constants: FittedConstants) -> FittedConstants:
    """Return the constants that explain the measured steps, too. Steps that contradict them make them less certain."""
    measured = np.log([[step.seconds, step.computing] for step in steps]).ravel()

    def predict(logs: Vector) -> Vector:
        values = TimeConstants.of(logs)
        times = [step_time(step.job, step.hardware, values) for step in steps]
        return np.log([[time.seconds, sum(time.parts[part] for part in COMPUTING)] for time in times]).ravel()

    proven = all(step.hardware.proven for step in steps)
    priors = constants.covariance if proven else np.minimum(UNPROVEN_FACTOR**2 * constants.covariance, 1)
    errors = (1 if proven else UNPROVEN_STEPS) * np.tile([STEP_ERROR, PART_ERROR], len(steps))
    precision = np.linalg.inv(priors)
    fit = ridge(predict, measured, errors, constants.logs, precision)
    rest, moved = (measured - predict(fit.logs)) / errors, fit.logs - constants.logs
    surprise = float(rest @ rest + moved @ precision @ moved) / len(measured)  # about 1 if priors and errors are right
    return FittedConstants(TimeConstants.of(fit.logs), max(1.0, surprise) * fit.covariance)
