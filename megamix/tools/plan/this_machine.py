"""Rates of the machine at hand, as `megamix doctor --json` has measured them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import harmonic_mean
from typing import Any

from megamix.tools.plan.time_hardware import Hardware

# A GPU's products stay those of its data sheet: what they reach of it is a constant of the model.
GPU_RATES = {"copy": "memory_bytes_per_s", "wire": "link_bytes_per_s"}
CPU_RATES = GPU_RATES | {"products": "dense_flops"}
UNITS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "GB/s": 1e9}
FIGURE = re.compile(rf"([\d,.]+) ({'|'.join(UNITS)})")


def measured_hardware(checks: Iterable[Mapping[str, Any]], base: Hardware) -> Hardware:
    """Return `base` with the rates in doctor's `checks`; of several directions the mean by time."""
    told = {check["check"]: check["seen"] for check in checks}
    seen = {check: FIGURE.findall(text) for check, text in told.items()}
    rates = GPU_RATES if base.gpu else CPU_RATES
    measured: dict[str, Any] = {
        field: harmonic_mean([float(number.replace(",", "")) * UNITS[unit] for number, unit in seen[check]])
        for check, field in rates.items()
        if seen.get(check)
    }
    if not base.gpu and "cores" in told:
        measured["cores"] = int(told["cores"].split()[0].rstrip(","))
    return replace(base, **measured)
