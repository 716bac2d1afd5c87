"""The step of a run, predicted and measured: a line for its log."""

from __future__ import annotations

import torch

from megamix.config import Config
from megamix.tools.plan.time_band import time_band
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import hardware_of
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import step_time


def time_line(config: Config, dp_size: int, device: torch.device, tokens_per_s: float) -> str:
    """Return a line that compares steps at this rate of all ranks with the prediction.

    Empty where there is none: for other devices, for models that the time model does not know, and during a ramp.
    """
    hardware = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if hardware is None or config.training.batch_ramp:
        return ""
    try:
        job = timed_job(config, dp_size)
    except ValueError as error:
        return f"time | NOT compared with what was planned: {error}"
    constants = fitted_constants()
    planned, measured = step_time(job, hardware, constants.values).seconds, job.step_tokens / tokens_per_s
    band = time_band(job, hardware, constants)
    return (
        f"time | a step: planned {planned:.3g} s within {band:.0%}, measured {measured:.3g} s "
        f"({measured / planned - 1:+.1%})"
    )
