"""How far a predicted step time may be off."""

from __future__ import annotations

import math

import numpy as np

from megamix.tools.plan.ridge import Vector, differentiate
from megamix.tools.plan.time_constants import FittedConstants, TimeConstants
from megamix.tools.plan.time_hardware import Hardware
from megamix.tools.plan.time_model import step_time
from megamix.tools.plan.time_work import TimedJob

NINETY = 1.645  # standard deviations on each side that hold 90 % of a normal distribution
ROW_ERROR = 0.035  # what is left of rows of a program that was fitted
UNSEEN_ERROR = 0.5  # of the traffic of context and expert parallelism, which no row of a fit has
PIECES_ERROR = 0.3  # of attention that context-parallel ranks compute in pieces: published rows are up to 42 % slower
FP8_ERROR = 0.1  # of jobs with products in FP8
UNPROVEN_ERROR = 0.1  # of machines without measured rows


def time_band(job: TimedJob, hardware: Hardware, constants: FittedConstants) -> float:
    """Return the relative half-width of the band that holds 90 % of the steps that a job like `job` will take."""
    time = step_time(job, hardware, constants.values)
    parts = time.parts

    def predict(logs: Vector) -> Vector:
        return np.log([step_time(job, hardware, TimeConstants.of(logs)).seconds])

    moves = differentiate(predict, constants.logs, predict(constants.logs))[0]
    variance = ROW_ERROR**2 + (0 if hardware.proven else UNPROVEN_ERROR**2) + moves @ constants.covariance @ moves
    variance += FP8_ERROR**2 if job.fp8 else 0
    unseen = UNSEEN_ERROR * (parts["cp"] + parts["ep"]) / time.seconds
    if job.cp > 1:
        unseen += PIECES_ERROR * parts["attention"] / (parts["products"] + parts["attention"] + parts["between"])
    return NINETY * math.sqrt(variance + unseen**2)
