"""Output of `plan --gpus`: the fastest layouts for each number of GPUs, each of which the traced plan says fits."""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megamix.base.console import Failed
from megamix.base.progress import ProgressLine
from megamix.config import Config, FirstLayers, axis_key, check_world_size, ranks_along
from megamix.config.checks import check_config
from megamix.tools.plan.layouts import LayoutSearch, TimedLayout, mesh_text
from megamix.tools.plan.time_band import time_band
from megamix.tools.plan.time_constants import FittedConstants

Row = dict[str, Any]
ROWS, ROWS_OF_SEVERAL = 5, 2  # for one number of GPUs, and for each of several
PARTS = {
    "products": "slower matrix products",
    "attention": "slower attention",
    "between": "more memory traffic between matrix products",
    "recompute": "more recompute",
    "tp": "more exposed tensor-parallel traffic",
    "bubble": "a longer wait in the pipeline",
    "dp": "more exposed data-parallel traffic",
    "cp": "more exposed context-parallel traffic",
    "ep": "more exposed expert-parallel traffic",
    "update": "a longer update",
    "host": "more waits for the host",
}
EXPOSED = ("tp", "dp", "cp", "ep")
TITLES = (
    f"{'GPUs':>6} {'memory':>7} {'step':>9} {'tokens/s':>9} {'MFU':>6} {'exposed':>7} {'days':>8} {'GPU-hours':>11}"
    f" {'band':>6}  layout"
)


def layout_lines(
    search: LayoutSearch, gpus: Sequence[int], before: FittedConstants, progress: ProgressLine, as_json: bool,
    plot: Path | None = None, title: str = "",
) -> Iterator[str]:  # fmt: skip
    """Yield the lines to print, as they become known; `Failed` for a number of GPUs without a layout.

    `before`: the constants without runs of one's own. `plot`: a file for a picture of the fastest, of a kind by its
    ending, with a `title`.
    """
    rows, wanted = dict[int, list[Row]](), ROWS if len(gpus) == 1 else ROWS_OF_SEVERAL
    progress.begin("tracing the memory of layouts", total=wanted * len(gpus))
    if not as_json:
        yield TITLES
    wide = None
    for number in gpus:
        found = rows[number] = []
        for layout, peak in fastest(search, number, wanted):
            wide = wide or time_band(layout.job, search.hardware, before)
            row = _row(search, layout, peak)
            found.append(row | {"lost_by": lost_by(found[0], row) if found else ""})
            progress.advance(1)
            if not as_json:
                yield _line(found[-1], mesh_text(layout.config))
        if not found and not as_json:
            yield Failed(f"{number:>6} {why_none(search, number)}")
    best = [found[0] for found in rows.values() if found]
    if best and plot is not None:
        from megamix.tools.plan.layout_picture import draw  # imports matplotlib

        draw(title, best).savefig(plot)
    if as_json:
        text = json.dumps({"layouts": rows, "band_without_runs": wide}, indent=2)
        yield text if all(rows.values()) else Failed(text)
    elif best:
        yield "times are predicted; no GPU has run megamix yet (docs/planning.md)"
        if search.constants is not before:
            yield f"with the runs the first row's band goes from {wide:.1%} to {best[0]['band']:.1%}"
        if len(gpus) == 1:
            yield f"the first row as settings: {' '.join(best[0]['settings'])}"
        if plot is not None:
            yield f"{plot}"


def fastest(search: LayoutSearch, gpus: int, wanted: int) -> Iterator[tuple[TimedLayout, int]]:
    """Yield the fastest layouts that fit, with the traced peak of each. Those that do not fit are replaced by slower
    ones of the same mesh.
    """
    from megamix.tools.plan.memory_plan import plan_memory  # imports torch, which takes seconds
    from megamix.train.objects import build_optimizer

    queue, seen, optimizer = search.layouts(gpus), set[str](), build_optimizer(search.config)
    while queue and wanted:
        layout = queue.pop(0)
        text = mesh_text(layout.config)
        if text in seen or _problems(layout):
            continue
        seen.add(text)
        peak = plan_memory(layout.config, layout.job.dp, "gpu", optimizer).peak
        if peak <= search.limit:
            wanted -= 1
            yield layout, peak
            continue
        for other in search.after(layout, peak):
            insort(queue, other, key=lambda one: one.time.seconds)


def _problems(layout: TimedLayout) -> list[str]:
    return [*check_config(layout.config), *check_world_size(layout.config, layout.job.gpus)]


def lost_by(best: Row, other: Row) -> str:
    """Return in words what a slower layout has most of."""
    more = {part: other["parts_s"][part] - best["parts_s"][part] for part in PARTS}
    part = max(more, key=more.__getitem__)
    share = f"{other['step_s'] / best['step_s'] - 1:+.1%}"
    return f"{share} by {PARTS[part]}" if more[part] > 0 else share


def why_none(search: LayoutSearch, gpus: int) -> str:
    """Return why no layout of so many GPUs can be: the configuration's checks, the batch, or the memory."""
    layouts = search.layouts(gpus)
    if layouts and all(_problems(layout) for layout in layouts):
        return f"no layout is a job that would start; take fewer GPUs; of the fastest: {_problems(layouts[0])[0]}"
    if any(True for _ in search.meshes(gpus)):
        return f"no layout fits {search.limit / 2**30:,.1f} GiB; take more GPUs"
    batch = search.config.training.global_batch_size
    return (
        f"training.global_batch_size: got {batch}, which no layout of {gpus} GPUs divides; take fewer GPUs, or a "
        f"multiple of {gpus} sequences"
    )


def settings(config: Config) -> Iterator[str]:
    """Yield a layout as overrides of the command line."""
    ranks, full = config.parallelism, config.model.recompute
    yield from (f"parallelism.{name}={getattr(ranks, name)}" for name in ("dp_size", "replicas", "shard"))
    yield from (f"parallelism.{axis_key(axis)}={ranks_along(ranks, axis)}" for axis in ("tp", "pp", "cp", "ep"))
    if ranks.pipeline is not None:
        names = "schedule", "stages_per_rank"
        yield from (f"parallelism.pipeline.{name}={getattr(ranks.pipeline, name)}" for name in names)
    yield f"model.recompute{f'.full={full.full}' if isinstance(full, FirstLayers) else f'={full}'}"
    yield f"training.micro_batch_size={config.training.micro_batch_size}"


def _line(row: Row, layout: str) -> str:
    lost = f"; {row['lost_by']}" if row["lost_by"] else ""
    return (
        f"{row['gpus']:>6} {row['memory'] / 2**30:>3.0f} GiB {row['step_s']:>7.3g} s {row['tokens_per_s']:>9,.0f} "
        f"{row['mfu']:>6.1%} {row['exposed_share']:>7.1%} {row['days']:>8,.3g} {row['gpu_hours']:>11,.0f} "
        f"{row['band']:>5.0%}   {layout}{lost}"
    )


def _row(search: LayoutSearch, layout: TimedLayout, peak: int) -> Row:
    """Return the figures of a layout, as --json has them. `peak`: bytes of a GPU, traced."""
    job, time = layout.job, layout.time
    hours = layout.config.pace.tokens(layout.config.pace.steps) / (time.tokens_per_s(job) * 3600)
    return {
        "gpus": job.gpus,
        "settings": [*settings(layout.config)],
        "memory": peak,
        "step_s": time.seconds,
        "parts_s": time.parts,
        "tokens_per_s": time.tokens_per_s(job),  # of one GPU
        "mfu": time.mfu(job, search.hardware),
        "exposed_share": sum(time.parts[part] for part in EXPOSED) / time.seconds,
        "days": hours / job.gpus / 24,
        "gpu_hours": hours,
        "band": time_band(job, search.hardware, search.constants),  # relative half-width
    }
