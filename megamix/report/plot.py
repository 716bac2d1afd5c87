"""The verb `plot`: a run's curves, loss scale, use of FP16's range and communication as PNGs in its folder, or the
curves of several in one. Needs matplotlib.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megamix.durable import written_aside
from megamix.report.metrics import TAGS, TRANSFERS, LayerPrecision, is_overflow, precision_tag
from megamix.run.run_folder import METRICS

_DPI = 120
_MOST_TICKS = 10
_ZERO_SHARES = precision_tag("zero_share", "")  # the first of LayerPrecision's; a layer's name follows

_FEW_COLUMNS = 5

# What of a RunHistory is drawn beside each other: its title and its unit.
_CURVES = {
    "loss": ("loss", "nats per token"),
    "lr": ("learning rate", "lr"),
    "grad_norm": ("norm of the gradient, before clipping", "grad_norm"),
    "tokens_per_s": ("throughput of all ranks", "tokens/s"),
}
# Which of LayerPrecision's numbers are drawn, their titles, units, and by what the numbers are multiplied.
_MAPS = {
    "unscaled_below_share": ("gradient below 2^-24 without a loss scale", "% of the layer's elements", 100.0),
    "headroom": ("headroom from max abs to 65504, loss scale included", "octaves", 1.0),
    "hidden_update_share": ("updates of the master that the half copy does not show", "% of updated elements", 100.0),
}


def plot(folders: Sequence[Path]) -> Iterator[str]:
    """Draw what metrics.jsonl of each folder holds; of several, their curves in one picture in the first one's folder.
    Yields a line for each file written, and for what cannot be drawn.

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
            figure.savefig(file, dpi=_DPI, format="png")  # a bare Figure draws with Agg: no screen is asked for
        yield f"{path}"
    if not others:
        yield from _left_out(history)


def _names(folders: Sequence[Path]) -> Sequence[str]:
    """What tells the runs apart: their folders' names, or paths where names are alike; as matplotlib shows them, which
    reads formulas between dollars, and leaves out of a legend what begins with an underscore.
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
    """Return figures by file name, without its ending, of what the history of the run `name` holds."""
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
    """Return the curves of one run or of several: a panel for each of _CURVES, in it a colour for each run."""
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
    panels[1, 1].set_ylim(bottom=0)  # what is noise looks like noise
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
    """The scale by step, which an overflow lowers at its own step and not only where the next row says so."""
    points, marks = ([*zip(series.steps, series.values, strict=True)] for series in (scale, overflows))
    drawn = points[:1]
    for (step, value), (next_step, next_value) in pairwise(points):
        if marks and marks[0] == (step, value):
            drawn.append((step, min(value, next_value)))
            del marks[0]
        drawn.append((next_step, next_value))
    return Series([step for step, _ in drawn], [value for _, value in drawn])


def _communication(name: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Of each transfer two bars: its way, from launched to landed, and in it or behind it the wait for it."""
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
    axes.invert_yaxis()  # the first to be reduced on top
    axes.grid(alpha=0.3, axis="x")
    axes.legend()
    return figure


def _heat_map(heat_map: HeatMap, title: str, unit: str, factor: float) -> Figure:
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
    figure.colorbar(mesh, label=unit)
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
    lr: Series
    grad_norm: Series
    tokens_per_s: Series
    loss_scale: Series  # empty in a run without one
    overflows: Series  # the scale at each
    transfers: list[dict[str, Any]]  # rows of a profiled attempt, by bucket; empty without one
    precision: dict[str, HeatMap]  # by the names of LayerPrecision's numbers; empty without examined steps


def read_history(folder: Path) -> RunHistory:
    """Read FOLDER/metrics.jsonl; a last line that is still being written is left out.

    Raises: ValueError naming what is missing or damaged.
    """
    file = folder / METRICS
    if not file.is_file():
        raise ValueError(f"RUN: {folder} has no metrics.jsonl; give the folder of a run")
    rows = list(_rows(file))
    if not rows:
        raise ValueError(f"RUN: {file} holds no complete line yet; wait for the run's first step")
    # An overflow's row has a scale, 1, even in a run without one; a log line's has null then.
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
            row = json.loads(line, parse_int=float)  # a number that no float can be is inf, and int() refuses that
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
    """Of the last profiled attempt but one, if there are two: the last one's gathers have no forward beside them."""
    attempt = TRANSFERS + "attempt"
    attempts = sorted({row[attempt] for row in rows if attempt in row})
    return [row for row in rows if row.get(attempt) in attempts[-2:][:1]]


def _precision(rows: Sequence[dict[str, Any]]) -> dict[str, HeatMap]:
    if not rows:
        return {}
    names = [field.name for field in fields(LayerPrecision) if field.name != "exponents"]
    layers = [tag.removeprefix(_ZERO_SHARES) for tag in rows[0] if tag.startswith(_ZERO_SHARES)]
    steps = [row["step"] for row in rows]
    return {
        name: HeatMap(
            layers, steps, [[_number(row.get(precision_tag(name, layer))) for row in rows] for layer in layers]
        )
        for name in names
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
