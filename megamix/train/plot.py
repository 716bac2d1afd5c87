"""The verb `plot`: a run's loss, loss scale and use of FP16's range as PNGs in its folder. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from megamix.durable import written_aside
from megamix.train.history import HeatMap, RunHistory, read_history

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
