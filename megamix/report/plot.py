"""Pictures of a run, drawn by the verb `plot` as PNGs in the run's folder. Needs matplotlib.

They show curves, loss scale, use of FP16's range and communication, or the curves of several runs in one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megamix.durable import written_aside
from megamix.report.metrics import TAGS, TRANSFERS, is_overflow, precision_tag
from megamix.run.run_folder import METRICS

_DPI = 120
_MOST_TICKS = 10
_ZERO_SHARES = precision_tag("zero_share", "")  # tag of LayerPrecision's first number; a layer's name follows

_FEW_COLUMNS = 5

# Curves of a RunHistory that are drawn beside each other, with title and unit.
_CURVES = {
    "loss": ("loss", "nats per token"),
    "lr": ("learning rate", "lr"),
    "grad_norm": ("norm of the gradient, before clipping", "grad_norm"),
    "tokens_per_s": ("throughput of all ranks", "tokens/s"),
}
# Numbers of LayerPrecision that are drawn, with title, unit and factor.
_MAPS = {
    "unscaled_below_share": ("gradient below 2^-24 without a loss scale", "% of the layer's elements", 100.0),
    "headroom": ("headroom from max abs to 65504, loss scale included", "octaves", 1.0),
    "hidden_update_share": ("updates of the master that the half copy does not show", "% of updated elements", 100.0),
}


def plot(folders: Sequence[Path]) -> Iterator[str]:
    """Draw the metrics.jsonl of each folder. Several runs share one picture of curves, in the first one's folder.

    Yields a line for each file written, and for each picture that cannot be drawn.
    Raises: ValueError, before anything is written, if there is nothing to read.
    """
    once = [run for place, run in enumerate(folders) if run.resolve() not in [run.resolve() for run in folders[:place]]]
    if len(once) < len(folders):
        yield "RUN: a run that is given twice is drawn once"
    folders = once
    runs = dict(zip(_names(folders), map(read_history, folders), strict=True))
    (name, history), *others = runs.items()
    drawn = {"compared": compared(runs)} if others else figures(name, history)
    for file_name, figure in drawn.items():
        path = folders[0] / f"{file_name}.png"
        with written_aside(path) as file:
            figure.savefig(file, dpi=_DPI, format="png")  # a bare Figure draws with Agg, which needs no screen
        yield f"{path}"
    if not others:
        yield from _left_out(history)


def _names(folders: Sequence[Path]) -> Sequence[str]:
    """Return names that tell the runs apart: their folders' names, or their paths if names are equal.

    Names are escaped for matplotlib, which reads formulas between dollars and leaves labels with a leading underscore
    out of a legend.
    """
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    return [re.sub("^_", "\u200b_", name).replace("$", r"\$") for name in names]


def _left_out(history: RunHistory) -> Iterator[str]:
    if not history.loss_scale.steps:
        yield "no loss_scale.png: this run has no loss scale"
    steps = history.loss.steps[-1] if history.loss.steps else 0
    fitting = f"metrics.precision_interval = {max(1, steps // _FEW_COLUMNS)}"
    if not history.precision:
        yield f"no heat maps: none of the {steps} steps was examined; with {fitting} a run as short as this has some"
    elif (columns := len(history.precision["headroom"].steps)) < _FEW_COLUMNS:
        yield f"heat maps of {columns} examined step(s) of {steps}; {fitting} gives a run as short as this one more"


def figures(name: str, history: RunHistory) -> dict[str, Figure]:
    """Return the figures of one run's history, by file name without ending. `name`: the run's."""
    drawn = {"loss": compared({name: history})}
    if history.loss_scale.steps:
        drawn["loss_scale"] = _loss_scale(name, history)
    if history.transfers:
        drawn["communication"] = _communication(name, history.transfers)
    for number, (title, unit, factor) in _MAPS.items():
        if number in history.precision:
            drawn[number] = _heat_map(history.precision[number], f"{name}: {title}", unit, factor)
    return drawn


def compared(runs: Mapping[str, RunHistory]) -> Figure:
    """Return the curves of one run or of several: one panel for each of _CURVES, one colour for each run."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(", ".join(runs))
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (curve, (title, unit)) in zip(panels.flat, _CURVES.items(), strict=True):
        for number, (name, history) in enumerate(runs.items()):
            series: Series = getattr(history, curve)
            axes.plot(series.steps, series.values, color=f"C{number}", label=name if len(runs) > 1 else "training")
            if curve == "loss":
                valid, label = history.valid_loss, "validation" if number == 0 else None
                axes.plot(valid.steps, valid.values, "o", color=f"C{number}", markeredgecolor="black", label=label)
        axes.set(title=title, ylabel=unit)
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    panels[1, 1].set_ylim(bottom=0)  # from zero, so that noise looks like noise
    for axes in panels[1]:
        axes.set_xlabel("step")
    return figure


def _loss_scale(name: str, history: RunHistory) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    line = _falling_at_once(history.loss_scale, history.overflows)
    axes.plot(line.steps, line.values, drawstyle="steps-post", label="loss scale")
    axes.plot(history.overflows.steps, history.overflows.values, "x", color="tab:red", label="overflow")
    axes.set_yscale("log", base=2)
    axes.set(title=f"{name}: loss scale", xlabel="step", ylabel="loss scale")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _falling_at_once(scale: Series, overflows: Series) -> Series:
    """Return the loss scale by step, with each drop at its overflow's own step rather than at the next row."""
    points, marks = ([*zip(series.steps, series.values, strict=True)] for series in (scale, overflows))
    drawn = points[:1]
    for (step, value), (next_step, next_value) in pairwise(points):
        if marks and marks[0] == (step, value):
            drawn.append((step, min(value, next_value)))
            del marks[0]
        drawn.append((next_step, next_value))
    return Series([step for step, _ in drawn], [value for _, value in drawn])


def _communication(name: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure with two bars per transfer: from launch to landing, and the wait for it within or behind that."""
    figure = Figure(figsize=(11, min(14.0, 2 + 0.4 * len(rows))), layout="constrained")
    axes = figure.subplots()
    for kind, colour, place in (("reduce_scatter", "C0", -0.2), ("all_gather", "C1", 0.2)):
        launched, landed, needed, waited = (
            [1e3 * row[tag] for row in rows if (tag := f"{TRANSFERS}{kind}/{when}") in row]
            for when in ("launched_s", "landed_s", "needed_s", "waited_s")
        )
        at = [row[TRANSFERS + "bucket"] + place for row in rows if f"{TRANSFERS}{kind}/launched_s" in row]
        way = [end - start for start, end in zip(launched, landed, strict=True)]
        label = kind.replace("_", "-")
        axes.barh(at, way, 0.3, launched, color=colour, alpha=0.4, label=f"{label} under way")
        axes.barh(at, waited, 0.15, needed, color=colour, label=f"waited for {label}: {sum(waited):.1f} ms")
    axes.set(
        title=f"{name}: communication of attempt {rows[0][TRANSFERS + 'attempt']:.0f}", xlabel="ms", ylabel="bucket"
    )
    buckets = sorted({row[TRANSFERS + "bucket"] for row in rows})
    axes.set_yticks(buckets[:: -(-len(buckets) // (4 * _MOST_TICKS))])
    axes.invert_yaxis()  # the first bucket to be reduced is on top
    axes.grid(alpha=0.3, axis="x")
    axes.legend()
    return figure


def _heat_map(heat_map: HeatMap, title: str, unit: str, factor: float) -> Figure:
    num_layers, num_steps = len(heat_map.layers), len(heat_map.steps)
    figure = Figure(figsize=(9, min(14.0, 2 + 0.25 * num_layers)), layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh([[factor * value for value in row] for row in heat_map.values])
    axes.set_facecolor("lightgrey")  # cells without a number, see docs/operations.md
    axes.invert_yaxis()  # the model's first layer is on top
    every = -(-num_steps // _MOST_TICKS)
    axes.set_xticks([column + 0.5 for column in range(0, num_steps, every)], map(str, heat_map.steps[::every]))
    every = -(-num_layers // (4 * _MOST_TICKS))
    axes.set_yticks([row + 0.5 for row in range(0, num_layers, every)], heat_map.layers[::every])
    axes.set(title=title, xlabel="examined step")
    figure.colorbar(mesh, label=unit)
    return figure


@dataclass(frozen=True, slots=True)
class Series:
    """Values by step; rows with null are left out."""

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
    """Values of a run that can be drawn."""

    loss: Series
    valid_loss: Series
    lr: Series
    grad_norm: Series
    tokens_per_s: Series
    loss_scale: Series  # empty in a run without one
    overflows: Series  # loss scale of each overflow
    transfers: list[dict[str, Any]]  # rows of a profiled attempt, by bucket; empty if none was profiled
    precision: dict[str, HeatMap]  # by the names in _MAPS; empty if no step was examined


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
    return RunHistory(
        **{name: _series(rows, TAGS[name]) for name in ("loss", "valid_loss", "lr", "grad_norm", "tokens_per_s")},
        loss_scale=Series([], []) if unscaled else _series(rows, TAGS["loss_scale"]),
        overflows=_series([row for row in rows if is_overflow(row)], TAGS["loss_scale"]),
        transfers=_transfers(rows),
        precision=_precision([row for row in rows if any(tag.startswith(_ZERO_SHARES) for tag in row)]),
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
    steps = [row["step"] for row in rows]
    return {
        name: HeatMap(layers, steps, [_numbers(rows, precision_tag(name, layer)) for layer in layers]) for name in _MAPS
    }


def _numbers(rows: Sequence[dict[str, Any]], tag: str) -> list[float]:
    """Return a tag's values, NaN for null."""
    return [math.nan if row.get(tag) is None else row[tag] for row in rows]
