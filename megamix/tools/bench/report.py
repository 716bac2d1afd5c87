"""Results of a bench: medians with their quartiles, their printed form, and a bench's line of JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megamix.base.machine import cpu_name, half_units, native_halves, num_cores
from megamix.base.progress import duration
from megamix.data import DISTRIBUTION
from megamix.train.own_code import version


class Spread(NamedTuple):
    """Median between its quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles, by linear interpolation between the values (numpy's default)."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios, round by round: a slow round slows both sides and cancels."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True, slots=True)
class Goal:
    """Figure that was promised beforehand, and the figure that was measured."""

    text: str
    measured: float | Spread
    bound: float
    at_least: bool = True  # False: at most

    @property
    def value(self) -> float:
        return self.measured.median if isinstance(self.measured, Spread) else self.measured

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        figure = show(self.measured, 3) if isinstance(self.measured, Spread) else f"{self.measured:.3f}"
        verdict, sign = "met" if self.met else "MISSED", ">=" if self.at_least else "<="
        return f"{verdict:<6} {figure} {sign} {self.bound:g}  {self.text}"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one bench."""

    bench: str
    settings: dict[str, Any]
    raw: dict[str, Any]  # values of every round
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [f"megamix bench {self.bench}", *table(self.columns, self.rows)]
        return "\n".join([*lines, *(goal.line() for goal in self.goals), *self.notes])

    def json_line(self, machine: dict[str, Any]) -> str:
        goals = [asdict(goal) | {"value": goal.value, "met": goal.met} for goal in self.goals]
        return json.dumps(asdict(self) | {"machine": machine, "goals": goals})


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns. All columns but the first hold numbers and are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in (columns, *rows)
    ]


def show(values: Sequence[float], digits: int = 0) -> str:
    """Return the median of values, or of their spread, between its quartiles."""
    low, median, high = values if isinstance(values, Spread) else spread(values)
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def describe_machine(card: str = "") -> dict[str, Any]:
    """Return where and when a bench ran. The load says whether others used the machine, too. `card`: name of the GPUs
    that compute.
    """
    return {
        "device": card or "CPU",
        "cards": torch.cuda.device_count() if card else 0,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),  # the units that torch's own kernels use
        "fp16_units": torch.float16 in half_units(),
        "bf16_units": torch.bfloat16 in half_units(),
        "bf16_products": "native" if torch.bfloat16 in native_halves() else "wide",
        "load": os.getloadavg()[0],
        "megamix": version(DISTRIBUTION),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return the kind of a machine in words. Ratios of one kind of machine do not hold on another."""
    if machine["cards"]:
        where = f"on {machine['cards']} {machine['device']}, beside {machine['cores']} cores of {machine['cpu']}"
        return f"{where}; load {machine['load']:.1f}, torch {machine['torch']}, CUDA {machine['cuda']}"
    units = [name for name, key in (("FP16", "fp16_units"), ("BF16", "bf16_units")) if machine[key]]
    return (
        f"on {machine['cpu']}, {machine['cores']} cores: {machine['vector_units']}, {' and '.join(units) or 'no half'} "
        f"units, BF16 products {machine['bf16_products']}; load {machine['load']:.1f}, torch {machine['torch']}. "
        "Do not compare them with figures of another kind of machine"
    )


def append_line(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(line + "\n")


def progress(text: str) -> None:
    """Print one line to stderr; the report itself goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def rounds_told(count: int) -> Iterator[int]:
    """Yield the numbers of the rounds. Print before each its number, and the time left by the rounds so far."""
    begun_s = time.monotonic()
    for number in range(count):
        done_s = time.monotonic() - begun_s
        left = f", about {duration(done_s / number * (count - number))} left" if number else ""
        progress(f"round {number + 1} of {count}{left}")
        yield number
