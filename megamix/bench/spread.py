"""What many noisy rounds come to: a median with its quartiles, and ratios paired by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A median between its quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles by linear interpolation between the values (numpy's default)."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of the ratios round by round: a machine that is slow for a whole round slows both sides and cancels."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
