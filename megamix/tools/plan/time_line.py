"""The step of a run, predicted and measured: a line for its log."""

from __future__ import annotations

import re

import torch

from megamix.config import Config
from megamix.tools.plan.time_band import time_band
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import load_hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import step_time

# Hardware by the driver's name of the device.
DEVICES = {
    r"NVIDIA H100 80GB HBM\d\w*": "h100-sxm",
    r"NVIDIA H200": "h200",
    r"(NVIDIA )?A100-SXM4-\d+GB": "a100",
    r"NVIDIA B200": "b200",
}


def time_line(config: Config, dp_size: int, device: torch.device, tokens_per_s: float) -> str:
    """Return a line that compares steps at this rate of all ranks with the prediction.

    Empty where there is none: for other devices, for models that the time model does not know, and during a ramp.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((hardware for pattern, hardware in DEVICES.items() if re.fullmatch(pattern, name)), None)
    if known is None or config.training.batch_ramp:
        return ""
    try:
        job = timed_job(config, dp_size)
    except ValueError as error:
        return f"time | NOT compared with what was planned: {error}"
    hardware, constants = load_hardware(known), fitted_constants()
    planned, measured = step_time(job, hardware, constants.values).seconds, job.step_tokens / tokens_per_s
    band = time_band(job, hardware, constants)
    return (
        f"time | a step: planned {planned:.3g} s within {band:.0%}, measured {measured:.3g} s "
        f"({measured / planned - 1:+.1%})"
    )
