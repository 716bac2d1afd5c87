"""Pictures of a run, or of several runs in one. Needs matplotlib, and no screen."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megamix.base.durable import written_aside
from megamix.launch.run_folder import METRICS
from megamix.log.history import HeatMap, RunHistory, read_history
from megamix.log.metrics import TRANSFERS

_WIDTH, _DPI = 5.75, 192  # inches, and dots an inch: letters that are readable even on a phone
_MOST_TICKS = 10

# Curves of a RunHistory, with title and unit.
_CURVES = {
    "loss": ("loss", "nats per token"),
    "lr": ("learning rate", ""),
    "grad_norm": ("gradient norm", ""),
    "tokens_per_s": ("tokens/s", ""),
}
# Heat maps of a RunHistory, with title, unit and factor.
_MAPS = {
    "unscaled_below_share": ("unscaled gradient below 2^-24, FP16's smallest number", "% of elements", 100.0),
    "headroom": ("doublings left to 65504, FP16's largest number", "octaves", 1.0),
    "hidden_update_share": ("updates that the half copy does not show", "% of updates", 100.0),
}


def plot(folders: Sequence[Path]) -> Iterator[str]:
    """Draw a run's pictures into its folder, or the curves of several into the first one's. Yield each file's path.

    Raises: ValueError, before anything is written, naming a folder with nothing to draw.
    """
    folders = [*{folder.resolve(): folder for folder in folders}.values()]  # each once
    histories = [read_history(folder) for folder in folders]
    for folder, history in zip(folders, histories, strict=True):
        if not history.loss.steps:
            raise ValueError(f"RUN: no loss in {folder / METRICS}; give the folder of a run that has logged a step")
    drawn = figures(histories[0])
    if len(folders) > 1:
        drawn = {"compared": compared(dict(zip(_names(folders), histories, strict=True)))}
    for name, figure in drawn.items():
        path = folders[0] / f"{name}.png"
        with written_aside(path) as file:
            file.write(png(figure))
        yield f"{path}"


def _names(folders: Sequence[Path]) -> Sequence[str]:
    """Return names that tell the runs apart: their folders' names, or their paths if names are equal.

    Names are escaped for matplotlib, which reads formulas between dollars and leaves labels with a leading underscore
    out of a legend.
    """
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    return [re.sub("^_", "\u200b_", name).replace("$", r"\$") for name in names]


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG. The same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # a bare Figure draws with Agg
    return file.getvalue()


def figures(history: RunHistory) -> dict[str, Figure]:
    """Return the figures of a run, by file name without ending: those for which it has numbers."""
    drawn = {}
    if history.loss.steps:
        drawn = {"loss": _loss(history), "curves": _curves({"training": history}, 1, [*_CURVES][1:])}
    if any(len(heat_map.columns) > 1 for heat_map in history.precision.values()):
        num_layers = max(len(heat_map.layers) for heat_map in history.precision.values())
        drawn["range"], panels = _panels(len(_MAPS) * (0.7 + 0.18 * num_layers), len(_MAPS))
        for axes, (name, told) in zip(panels, _MAPS.items(), strict=True):
            _heat_map(axes, history.precision[name], "examined step", *told)
    for step, loads in history.loads.items():
        drawn["load"], (axes,) = _panels(1 + 0.25 * len(loads.layers))
        title = f"tokens of each expert in the batch of step {step}"
        _heat_map(axes, loads, "expert", title, "times the layer's mean", 1.0)
    if history.transfers:
        drawn["communication"] = _communication(history.transfers)
    return drawn


def compared(runs: Mapping[str, RunHistory]) -> Figure:
    """Return the curves of several runs, by name: one colour for each run."""
    return _curves(runs, 2, [*_CURVES])


def _panels(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, min(height, 14.0)), dpi=_DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure, panels


def _label(axes: Axes, title: str, y: str = "", x: str = "step") -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlabel=x, ylabel=y)
    if x == "step":
        axes.locator_params(axis="x", integer=True)


def _curves(runs: Mapping[str, RunHistory], rows: int, curves: Sequence[str]) -> Figure:
    figure, panels = _panels(2.0 * rows, rows, len(curves) // rows)
    for axes, curve in zip(panels, curves, strict=True):
        _draw(axes, curve, runs)
    panels[-1].set_ylim(bottom=0)  # throughput from zero, so that noise looks like noise
    return figure


def _draw(axes: Axes, curve: str, runs: Mapping[str, RunHistory]) -> None:
    """Draw one curve of each run, with a dotted line where a run went on; losses with their validations and legend."""
    for number, (name, history) in enumerate(runs.items()):
        colour, series = f"C{number}", getattr(history, curve)
        axes.plot(series.steps, series.values, color=colour, label=name)
        of_weights = ("validation", "o", history.valid_loss), ("averaged weights", "D", history.average_loss)
        for label, mark, valid in of_weights if curve == "loss" else ():
            if valid.steps:
                axes.plot(valid.steps, valid.values, mark, color=colour, markeredgecolor="black", label=label)
        of_sets = history.valid_sets if curve == "loss" and len(runs) == 1 else {}
        for place, (set_name, series) in enumerate(of_sets.items(), start=1):
            axes.plot(series.steps, series.values, ".--", color=f"C{place}", label=f"validation, {set_name}")
        for step in history.resumed.steps:
            axes.axvline(step, color=colour, linestyle=":", label="resumed")
    _label(axes, *_CURVES[curve])
    if curve == "loss":
        lines, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, lines, strict=True))
        axes.legend(once.values(), once.keys(), fontsize="small")


def _loss(history: RunHistory) -> Figure:
    """Return the loss, and beside it the loss scale with its overflows if the run has one."""
    figure, panels = _panels(2.1, columns=2 if history.loss_scale.steps else 1)
    _draw(panels[0], "loss", {"training": history})
    for axes in panels[1:]:
        scale, overflows = history.loss_scale, history.overflows
        axes.plot(scale.steps, scale.values, drawstyle="steps-pre")  # falls at its overflow, not at the next row
        axes.plot(overflows.steps, overflows.values, "x", color="tab:red", label="overflow")
        axes.set_yscale("log", base=2)
        _label(axes, "loss scale")
        axes.legend(fontsize="small")
    return figure


def _communication(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure with two bars per transfer: from launch to landing, and the wait for it within or after that."""
    figure, (axes,) = _panels(1.5 + 0.3 * len(rows))
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
    _label(axes, f"communication of attempt {rows[0][TRANSFERS + 'attempt']}", "bucket", "ms")
    buckets = sorted({row[TRANSFERS + "bucket"] for row in rows})
    axes.set_yticks(buckets[:: -(-len(buckets) // (4 * _MOST_TICKS))])
    axes.invert_yaxis()  # the first bucket to be reduced is on top
    axes.legend(fontsize="small")
    return figure


def _heat_map(axes: Axes, heat_map: HeatMap, columns: str, title: str, unit: str, factor: float) -> None:
    num_layers, num_columns = len(heat_map.layers), len(heat_map.columns)
    mesh = axes.pcolormesh([[factor * value for value in row] for row in heat_map.values])
    axes.set_facecolor("lightgrey")  # cells without a number, see docs/watch.md
    axes.grid(visible=False)
    axes.invert_yaxis()  # the model's first layer is on top
    every = -(-num_columns // _MOST_TICKS)
    axes.set_xticks([column + 0.5 for column in range(0, num_columns, every)], map(str, heat_map.columns[::every]))
    every = -(-num_layers // (4 * _MOST_TICKS))
    axes.set_yticks([row + 0.5 for row in range(0, num_layers, every)], heat_map.layers[::every])
    _label(axes, title, x=columns)
    axes.figure.colorbar(mesh, label=unit, ax=axes)
