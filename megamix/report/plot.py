"""Pictures of a run, drawn by the verb `plot` as PNGs in the run's folder. Needs matplotlib.

They show curves, loss scale, use of FP16's range, communication and the load of experts, or the curves of several runs
in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megamix.durable import write_text, written_aside
from megamix.report.history import HeatMap, RunHistory, Series, read_history
from megamix.report.metrics import TRANSFERS
from megamix.report.page import PAGE, run_page

_DPI = 120
_MOST_TICKS = 10

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
    drawn, pictures = {"compared": compared(runs)} if others else figures(name, history), list[Path]()
    for file_name, figure in drawn.items():
        path = folders[0] / f"{file_name}.png"
        with written_aside(path) as file:
            figure.savefig(file, dpi=_DPI, format="png")  # a bare Figure draws with Agg, which needs no screen
        pictures.append(path)
        yield f"{path}"
    if not others:
        write_text(folders[0] / PAGE, run_page(folders[0], history, pictures))
        yield f"{folders[0] / PAGE}"
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
    columns = history.examined_steps
    if columns < 2:
        yield f"no heat maps: {columns} of {steps} steps examined; with {fitting} a run as short as this has some"
    elif columns < _FEW_COLUMNS:
        yield f"heat maps of {columns} examined steps of {steps}; {fitting} gives a run as short as this one more"


def figures(name: str, history: RunHistory) -> dict[str, Figure]:
    """Return the figures of one run's history, by file name without ending. `name`: the run's."""
    drawn = {"loss": compared({name: history})}
    if history.loss_scale.steps:
        drawn["loss_scale"] = _loss_scale(name, history)
    if history.transfers:
        drawn["communication"] = _communication(name, history.transfers)
    for number, (title, unit, factor) in _MAPS.items():
        if history.examined_steps > 1:
            heat_map = history.precision[number]
            drawn[number] = _heat_map(heat_map, f"{name}: {title}", unit, factor, columns="examined step")
    for step, loads in history.loads.items():
        title = f"{name}: tokens of each expert in the batch of step {step}"
        drawn["load"] = _heat_map(loads, title, "times the layer's mean", 1.0, columns="expert")
    return drawn


def compared(runs: Mapping[str, RunHistory]) -> Figure:
    """Return the curves of one run or of several: one panel for each of _CURVES, one colour for each run."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(", ".join(runs))
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (curve, (title, unit)) in zip(panels.flat, _CURVES.items(), strict=True):
        for number, (name, history) in enumerate(runs.items()):
            colour, series = f"C{number}", getattr(history, curve)
            axes.plot(series.steps, series.values, color=colour, label=name if len(runs) > 1 else "training")
            of_weights = ("validation", "o", history.valid_loss), ("averaged weights", "D", history.average_loss)
            for label, mark, valid in of_weights if curve == "loss" else ():
                if valid.steps:
                    axes.plot(valid.steps, valid.values, mark, color=colour, markeredgecolor="black", label=label)
            of_sets = history.valid_sets if curve == "loss" and len(runs) == 1 else {}
            for place, (set_name, series) in enumerate(of_sets.items(), start=1):
                axes.plot(series.steps, series.values, ".--", color=f"C{place}", label=f"validation, {set_name}")
            for step in history.resumed.steps:
                axes.axvline(step, color=colour, linestyle=":", label="resumed")
        axes.set(title=title, ylabel=unit)
        axes.grid(alpha=0.3)
    lines, labels = panels[0, 0].get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(lines), strict=True))  # the first line of each kind
    panels[0, 0].legend([once[label] for label in dict.fromkeys(labels)], [*dict.fromkeys(labels)])
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
    """Return a figure with two bars per transfer: from launch to landing, and the wait for it within or after that."""
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


def _heat_map(heat_map: HeatMap, title: str, unit: str, factor: float, *, columns: str) -> Figure:
    num_layers, num_columns = len(heat_map.layers), len(heat_map.columns)
    figure = Figure(figsize=(9, min(14.0, 2 + 0.25 * num_layers)), layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh([[factor * value for value in row] for row in heat_map.values])
    axes.set_facecolor("lightgrey")  # cells without a number, see docs/operations.md
    axes.invert_yaxis()  # the model's first layer is on top
    every = -(-num_columns // _MOST_TICKS)
    axes.set_xticks([column + 0.5 for column in range(0, num_columns, every)], map(str, heat_map.columns[::every]))
    every = -(-num_layers // (4 * _MOST_TICKS))
    axes.set_yticks([row + 0.5 for row in range(0, num_layers, every)], heat_map.layers[::every])
    axes.set(title=title, xlabel=columns)
    figure.colorbar(mesh, label=unit)
    return figure
