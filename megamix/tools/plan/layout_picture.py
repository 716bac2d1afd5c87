"""Picture of the fastest layout on each number of GPUs, by matplotlib: what a token costs, by the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

_COLOURS = colormaps["tab20"](range(20))  # one for each part of a step


def draw(title: str, records: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure with a bar for each record of `plan --gpus --json`. It is as long as a GPU's time for a token in
    microseconds, with a colour for each part of a step; the line at its end is the band.
    """
    figure = Figure(figsize=(10, 1.6 + 0.35 * len(records)), layout="constrained")
    axes = figure.subplots()
    rows = [f"{record['gpus']:,}" for record in records]
    ends = [0.0] * len(records)
    for part, colour in zip(records[0]["parts_s"], _COLOURS, strict=False):
        widths = [1e6 / it["tokens_per_s"] * it["parts_s"][part] / it["step_s"] for it in records]
        axes.barh(rows, widths, left=ends, color=colour, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.errorbar(ends, rows, xerr=[it["band"] * end for it, end in zip(records, ends, strict=True)], fmt="k,")
    for row, end, it in zip(rows, ends, records, strict=True):
        axes.annotate(f"  {it['tokens_per_s']:,.0f} tokens/s a GPU, {it['mfu']:.1%} MFU", (end * (1 + it["band"]), row))
    axes.invert_yaxis()
    axes.set(title=title, xlabel="GPU time for a token, microseconds", ylabel="GPUs", xlim=(0, 1.6 * max(ends)))
    figure.legend(loc="outside lower center", ncols=6)
    return figure
