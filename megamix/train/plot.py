"""The verb `plot`: a run's loss, loss scale and use of FP16's range as PNGs in its folder. Needs matplotlib."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megamix.durable import written_aside
from megamix.train.metrics import TAGS, LayerPrecision, precision_tag

_DPI = 120
_MOST_TICKS = 10

# Which of LayerPrecision's numbers are drawn, what they are called, and by what the axis multiplies them.
_MAPS = {
    "unscaled_below_share": ("gradient elements below 2^-24 without a loss scale (%)", 100.0),
    "headroom": ("headroom: octaves from max abs to 65504, loss scale included", 1.0),
    "hidden_update_share": ("updates of the master that the half copy does not show (%)", 100.0),
}


def plot(folder: Path) -> Iterator[str]:
    """Draw what FOLDER/metrics.jsonl holds. Yields a line for each file written, and for what cannot be drawn.

    Raises: ValueError, before anything is written, if there is nothing to read.
    """
    history = read_history(folder)
    for name, figure in figures(history).items():
        path = folder / f"{name}.png"
        with written_aside(path) as file:
            figure.savefig(file, dpi=_DPI, format="png")  # a bare Figure draws with Agg: no screen is asked for
        yield f"{path}"
    if not history.loss_scale.steps:
        yield "no loss_scale.png: this run has no loss scale"
    if not history.precision:
        yield (
            "no heat maps: metrics.jsonl has no examined step; metrics.precision_interval says how often one is taken "
            "(0: never)"
        )


def figures(history: RunHistory) -> dict[str, Figure]:
    """File name without its ending -> figure, of what the history holds."""
    drawn = {"loss": _loss(history)}
    if history.loss_scale.steps:
        drawn["loss_scale"] = _loss_scale(history)
    for name, (title, factor) in _MAPS.items():
        if name in history.precision:
            drawn[name] = _heat_map(history.precision[name], title, factor)
    return drawn


def _loss(history: RunHistory) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.loss.steps, history.loss.values, label="training")
    axes.plot(history.valid_loss.steps, history.valid_loss.values, "o", label="validation")
    axes.set(title="loss", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _loss_scale(history: RunHistory) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.loss_scale.steps, history.loss_scale.values, drawstyle="steps-post", label="loss scale")
    axes.plot(history.overflows.steps, history.overflows.values, "x", color="tab:red", label="overflow")
    axes.set_yscale("log", base=2)
    axes.set(title="loss scale", xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _heat_map(heat_map: HeatMap, title: str, factor: float) -> Figure:
    num_layers, num_steps = len(heat_map.layers), len(heat_map.steps)
    figure = Figure(figsize=(9, min(14.0, 2 + 0.25 * num_layers)), layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh([[factor * value for value in row] for row in heat_map.values])
    axes.set_facecolor("lightgrey")  # where there is no number, see docs/operations.md
    axes.invert_yaxis()  # the model's first layer on top
    every = -(-num_steps // _MOST_TICKS)
    axes.set_xticks([column + 0.5 for column in range(0, num_steps, every)], map(str, heat_map.steps[::every]))
    every = -(-num_layers // (4 * _MOST_TICKS))
    axes.set_yticks([row + 0.5 for row in range(0, num_layers, every)], heat_map.layers[::every])
    axes.set(title=title, xlabel="examined step")
    figure.colorbar(mesh)
    return figure


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
