"""Constants of the time model, and how far they may be off."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
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
    own: float = 1.0


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """Constants, and the relative standard deviation of each."""

    values: TimeConstants
    errors: dict[str, float]


def fitted_constants() -> FittedConstants:
    """Return the constants that were fitted to published rows."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    values = TimeConstants(**{name: row["value"] for name, row in table.items()})
    return FittedConstants(values, {name: row["error"] for name, row in table.items()})
