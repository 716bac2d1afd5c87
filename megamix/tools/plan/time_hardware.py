"""Rates of a machine: one TOML file for each kind, in `hardware/`, or what `megamix doctor --json` has measured."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

FOLDER = Path(__file__).with_name("hardware")
# A GPU's products stay those of its data sheet: what they reach of it is a constant of the model.
GPU_RATES = {"copy": "memory_bytes_per_s", "wire": "link_bytes_per_s"}
CPU_RATES = GPU_RATES | {"products": "dense_flops"}
UNITS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "GB/s": 1e9}
FIGURE = re.compile(rf"([\d,.]+) ({'|'.join(UNITS)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one device and of its links, in operations and bytes per second."""

    device: str | None = None  # pattern of the driver's name of such a device alone
    dense_flops: float  # peak of FP16 and BF16 products
    fp8_flops: float | None = None
    power_share: float = 1.0  # of the peak's clock that the power limit allows
    units: int  # multiprocessors
    memory_bytes: float
    memory_bytes_per_s: float  # rate of a copy, read and write together
    node_size: int  # devices
    link_bytes_per_s: float  # of one device within a node, for ring collectives
    node_bytes_per_s: float  # of all network adapters of a node together
    attention_forward: float  # share of dense_flops of the causal kernel, on long sequences and heads of 128
    attention_backward: float
    gpu: bool  # whose host works ahead of it; a CPU is its own host
    proven: bool  # whether measured rows of this machine exist
    launch_s: float = 3e-6  # between two kernels of a product
    wake_s: float = 0.0  # of two ranks of a CPU that wait for each other
    cores: int = 0  # that a CPU's ranks share; 0: each rank has one device of its own

    def shared(self, ranks: int) -> Hardware:
        """Return the rates of each of `ranks` ranks of one machine: its threads, or its share of a core."""
        if not self.cores:
            return self
        share = self.cores // ranks or self.cores / ranks
        return replace(
            self,
            dense_flops=share * self.dense_flops,
            memory_bytes_per_s=share * self.memory_bytes_per_s,
            link_bytes_per_s=min(1, share) * self.link_bytes_per_s,
            launch_s=self.launch_s / min(1, share),
        )


def load_hardware(name: str) -> Hardware:
    """Return the rates in the file `name`.toml.

    Raises: ValueError if there is no such file.
    """
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
        raise ValueError(f'hardware: got "{name}", known are {known}; write one of them')
    return Hardware(**tomllib.loads(path.read_text(encoding="utf-8")))


def hardware_of(device_name: str) -> Hardware | None:
    """Return the rates of the device that the driver calls so; None if no file is about it."""
    files = (load_hardware(file.stem) for file in FOLDER.glob("*.toml"))
    return next((each for each in files if each.device and re.fullmatch(each.device, device_name)), None)


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
