"""History of a run: what its metrics.jsonl says, as series by step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megamix.report.metrics import (
    TAGS,
    TRANSFERS,
    LayerPrecision,
    is_overflow,
    load_tag,
    over_mean,
    precision_tag,
    set_tag,
)
from megamix.run.run_folder import METRICS

_SET = re.compile(re.escape(set_tag("")) + r"[A-Za-z0-9_-]+")  # tag of a validation set
_ZERO_SHARES = precision_tag("zero_share", "")  # tag of LayerPrecision's first number; a layer's name follows
_COUNTS = load_tag("counts", "")  # likewise of a layer's counts


@dataclass(frozen=True, slots=True)
class Series:
    """Values by step; rows with null are left out."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Numbers by layer and column: one of LayerPrecision's by examined step, or loads by expert."""

    layers: list[str]  # in the order of the model
    columns: list[int]
    values: list[list[float]]  # by layer, then column; NaN for null, and where a layer has fewer columns


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Values of a run that can be drawn."""

    loss: Series
    valid_loss: Series
    average_loss: Series  # validation loss of the average of the weights
    valid_sets: dict[str, Series]  # losses of validation sets by name
    lr: Series
    grad_norm: Series
    tokens_per_s: Series
    tokens: Series  # sum over all updates so far
    loss_scale: Series  # empty in a run without one
    overflows: Series  # loss scale of each overflow
    transfers: list[dict[str, Any]]  # rows of a profiled attempt, by bucket; empty if none was profiled
    resumed: Series  # steps from which the run went on
    precision: dict[str, HeatMap]  # by LayerPrecision's numbers; empty if no step was examined
    loads: dict[int, HeatMap]  # of the last update whose counts were written, by its step; empty if there is none

    @property
    def examined_steps(self) -> int:
        return len(self.precision["headroom"].columns) if self.precision else 0


def read_history(folder: Path) -> RunHistory:
    """Return the history in FOLDER/metrics.jsonl; a last line that is still being written is left out.

    Raises: ValueError naming the file that is missing or the line that is damaged.
    """
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"RUN: {folder} has no metrics.jsonl; give the folder of a run")
    rows = list(_rows(file))
    if not rows:
        raise ValueError(f"RUN: {file} holds no complete line yet; wait for the run's first step")
    # Even without a loss scale, an overflow's row has a scale of 1; a log line's scale is null then.
    unscaled = any(TAGS["loss"] in row and row.get(TAGS["loss_scale"]) is None for row in rows)
    of_sets = dict.fromkeys(tag for row in rows for tag in row if _SET.fullmatch(tag))
    return RunHistory(
        **{
            name: _series(rows, TAGS[name])
            for name in ("loss", "valid_loss", "average_loss", "lr", "grad_norm", "tokens_per_s", "tokens")
        },
        valid_sets={tag.removeprefix(set_tag("")): _series(rows, tag) for tag in of_sets},
        loss_scale=Series([], []) if unscaled else _series(rows, TAGS["loss_scale"]),
        overflows=_series([row for row in rows if is_overflow(row)], TAGS["loss_scale"]),
        transfers=_transfers(rows),
        resumed=_series(rows, TAGS["resumed"]),
        precision=_precision([row for row in rows if any(tag.startswith(_ZERO_SHARES) for tag in row)]),
        loads=_loads(rows),
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=float)  # as floats: a number too large for one is inf, which int() refuses
            yield {**row, "step": int(row["step"])}
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(
                f"RUN: line {number} of {file} is damaged, no object with a step; delete that line"
            ) from error


def _series(rows: Sequence[dict[str, Any]], tag: str) -> Series:
    points = [(row["step"], row[tag]) for row in rows if row.get(tag) is not None]
    return Series([step for step, _ in points], [value for _, value in points])


def _transfers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last profiled attempt but one, if there are two, else of the only one.

    The last one's gathers have no forward beside them.
    """
    attempt = TRANSFERS + "attempt"
    attempts = sorted({row[attempt] for row in rows if attempt in row})
    return [row for row in rows if row.get(attempt) in attempts[-2:][:1]]


def _precision(rows: Sequence[dict[str, Any]]) -> dict[str, HeatMap]:
    if not rows:
        return {}
    layers = [tag.removeprefix(_ZERO_SHARES) for tag in rows[0] if tag.startswith(_ZERO_SHARES)]
    steps, numbers = [row["step"] for row in rows], [known.name for known in fields(LayerPrecision)]
    return {
        name: HeatMap(layers, steps, [_numbers(rows, precision_tag(name, layer)) for layer in layers])
        for name in numbers if name != "exponents"
    }  # fmt: skip


def _numbers(rows: Sequence[dict[str, Any]], tag: str) -> list[float]:
    """Return a tag's values, NaN for null."""
    return [math.nan if row.get(tag) is None else row[tag] for row in rows]


def _loads(rows: Sequence[dict[str, Any]]) -> dict[int, HeatMap]:
    """Return the loads of the last row that holds counts, by the row's step."""
    for row in reversed(rows):
        counts = {tag: value for tag, value in row.items() if tag.startswith(_COUNTS) and isinstance(value, list)}
        if found := {tag.removeprefix(_COUNTS): over_mean(each) for tag, each in counts.items()}:
            width = max(map(len, found.values()))
            values = [loads + [math.nan] * (width - len(loads)) for loads in found.values()]
            return {row["step"]: HeatMap([*found], [*range(width)], values)}
    return {}
