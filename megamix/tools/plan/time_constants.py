"""Constants of the time model, and how far they may be off."""

from __future__ import annotations

import tomllib
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megamix.tools.plan.ridge import Vector

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class TimeConstants:
    """Numbers that were fitted to measured steps; `time_constants.toml` has the prior and the sentence of each."""

    product_rate: float
    half_inner: float
    attention_rate: float
    traffic: float
    hop_s: float
    dp_exposed: float
    tp_exposed: float
    tp_overlapped: float
    step_s: float
    own: float = 1.0  # factor of a program's whole step

    @classmethod
    def of(cls, logs: Vector) -> TimeConstants:
        """Return the constants whose logarithms, in the order of the fields, are `logs`."""
        return cls(*np.exp(logs).tolist())


class FittedConstants(NamedTuple):
    """Constants, and the covariance (n, n) of their logarithms, in the order of TimeConstants."""

    values: TimeConstants
    covariance: Vector

    @property
    def logs(self) -> Vector:
        return np.log(astuple(self.values))


def fitted_constants() -> FittedConstants:
    """Return the constants that were fitted to published rows."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    errors = [table[field.name]["error"] for field in fields(TimeConstants)]
    values = TimeConstants(**{name: row["value"] for name, row in table.items()})
    return FittedConstants(values, np.diag(np.square(errors)))
