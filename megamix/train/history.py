"""A run's metrics.jsonl, read back for drawing. No torch here."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megamix.train.metrics import TAGS, LayerPrecision, precision_tag


@dataclass(frozen=True, slots=True)
class Series:
    """One value by step; rows in which it is null are left out."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One of LayerPrecision's numbers by layer and examined step."""

    layers: list[str]  # in the order of the model
    steps: list[int]
    values: list[list[float]]  # by layer, then step; NaN for null


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What can be drawn of a run."""

    loss: Series
    valid_loss: Series
    loss_scale: Series  # empty in a run without one
    overflows: Series  # the scale at each
    precision: dict[str, HeatMap]  # by the names of LayerPrecision's numbers; empty without examined steps


def read_history(folder: Path) -> RunHistory:
    """Read FOLDER/metrics.jsonl; a last line that is still being written is left out.

    Raises: ValueError naming what is missing or damaged.
    """
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"RUN: {folder} has no metrics.jsonl; give the folder of a run")
    rows = list(_rows(file))
    if not rows:
        raise ValueError(f"RUN: {file} holds no complete line yet; wait for the run's first step")
    # An overflow's row has a scale, 1, even in a run without one; a log line's has null then.
    unscaled = any(TAGS["loss"] in row and row.get(TAGS["loss_scale"]) is None for row in rows)
    return RunHistory(
        loss=_series(rows, TAGS["loss"]),
        valid_loss=_series(rows, TAGS["valid_loss"]),
        loss_scale=Series([], []) if unscaled else _series(rows, TAGS["loss_scale"]),
        overflows=_series(list(_overflows(rows)), TAGS["loss_scale"]),
        precision=_precision([row for row in rows if any(tag.startswith("precision/") for tag in row)]),
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            yield {"step": int(row["step"]), **row}
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(
                f"RUN: line {number} of {file} is damaged, no object with a step; delete that line"
            ) from error


def _series(rows: Sequence[dict[str, Any]], tag: str) -> Series:
    points = [(row["step"], row[tag]) for row in rows if row.get(tag) is not None]
    return Series([step for step, _ in points], [value for _, value in points])


def _overflows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows in which the number of skipped steps has grown."""
    skipped = 0
    for row in rows:
        now = row.get(TAGS["skipped_steps"], skipped)
        if now > skipped:
            yield row
        skipped = now


def _precision(rows: Sequence[dict[str, Any]]) -> dict[str, HeatMap]:
    if not rows:
        return {}
    names = [field.name for field in fields(LayerPrecision) if field.name != "exponents"]
    prefix = precision_tag(names[0], "")
    layers = [tag.removeprefix(prefix) for tag in rows[0] if tag.startswith(prefix)]
    steps = [row["step"] for row in rows]
    return {
        name: HeatMap(
            layers, steps, [[_number(row.get(precision_tag(name, layer))) for row in rows] for layer in layers]
        )
        for name in names
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
