"""Compare AdamW, NAG and Muon, each at its best learning rate: the loss with equal tokens, and in equal time.

`python docs/studies/optimizers.py [--small]` shows what figures/optimizers.json keeps. That takes hours, so it has
commands of its own: `optimizers.py train` trains what is missing, one run after the other, and may be stopped and
started again; Every run is a job as `megamix train` runs it, in BF16 on one rank.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import long_runs
import numpy as np
import study
from long_runs import SEEDS, Curve, Curves, Plan, Run, best_of, grid, mean_and_spread

from megamix import Muon
from megamix.plugins import OPTIMIZERS

SETTINGS = (
    "precision.dtype=bf16", "optimizer.compile=false", "metrics.precision_interval=0", "metrics.tensorboard=false",
    "training.global_batch_size=8",
)  # fmt: skip
WIDTH = ("training.steps=130", "training.eval_interval=26", "lr_schedule.warmup_steps=30")
SIZES = {
    "2 M": ("training.eval_interval=13",),
    "2 M, 206 steps": ("training.eval_interval=13", "training.steps=206"),  # which take Muon AdamW's time
    "11 M": (
        "model.hidden_size=384", "model.num_layers=6", "model.num_heads=12",
        "training.steps=512", "training.global_batch_size=16", "training.eval_interval=32",
    ),
    "width 64": ("model.hidden_size=64", "model.num_heads=2", *WIDTH),
    "width 256": ("model.hidden_size=256", "model.num_heads=8", *WIDTH),
    "small": (
        "model.vocab_size=300", "model.seq_len=32", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
        "training.steps=12", "training.eval_interval=4", "training.eval_batches=2", "lr_schedule.warmup_steps=4",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OneScale(Muon):
    """Muon without the width rule: every matrix has the scale of the quickstart's square ones."""

    def lr_scale(self, rows: int, columns: int) -> float:
        return 0.2 * math.sqrt(192)


WAYS = {
    "AdamW": ("optimizer.name=adamw",),
    "NAG": ("optimizer.name=nag", "optimizer.weight_decay=0"),
    "Muon": ("optimizer.name=muon",),
    "Muon, one scale": ("optimizer.name=muon",),
}
ADAMW, NAG, MUON = (2e-3, 4e-3, 1e-3, 8e-3), (0.4, 0.2, 0.8, 0.1), (8e-3, 4e-3, 16e-3, 32e-3)
# The learning rate that is trained first stands first, the grids, too.
GRIDS = {
    ("2 M", "Muon"): MUON, ("2 M", "AdamW"): ADAMW, ("2 M", "NAG"): NAG, ("2 M, 206 steps", "Muon"): MUON[:3],
    ("width 64", "Muon"): MUON, ("width 64", "Muon, one scale"): MUON,
    ("width 256", "Muon"): MUON, ("width 256", "Muon, one scale"): MUON,
    ("11 M", "Muon"): (8e-3, 4e-3, 16e-3, 2e-3), ("11 M", "AdamW"): (2e-3, 1e-3, 4e-3, 5e-4), ("11 M", "NAG"): NAG,
}  # fmt: skip
# A step's median time over that of AdamW's in the same round, two ranks that divide a batch.
TIMES = {
    ("2 M", "AdamW"): 1.0, ("2 M", "NAG"): 1.05, ("2 M", "Muon"): 1.26,
    ("11 M", "AdamW"): 1.0, ("11 M", "Muon"): 1.11,
}  # fmt: skip


def train(run: Run, texts: Path, folder: Path) -> Curve:
    muon = OneScale if run.way == "Muon, one scale" else Muon
    with mock.patch.dict(OPTIMIZERS.registered, muon=muon):
        return long_runs.train(
            run, "quickstart_adamw.toml", (*SETTINGS, *SIZES[run.size], *WAYS[run.way]), texts, folder
        )


PLAN = Plan("optimizers", GRIDS, train, of_one_seed=("width 64", "width 256"))


def measure(small: bool = False) -> Curves:
    if not small:
        return PLAN.read_kept()
    with tempfile.TemporaryDirectory() as folder:
        texts = study.prepare_text(True, Path(folder))
        small_runs = [Run("small", way, 0.4 if way == "NAG" else 8e-3, SEEDS[0]) for way in WAYS]
        return {run: train(run, texts, Path(folder) / run.way) for run in small_runs}


def text(curves: Curves) -> str:
    best, grids = [], []
    for size, way in dict.fromkeys(run[:2] for run in curves):
        lr, of_seeds = best_of(curves, size, way)
        losses = (f"{loss:.3f} at {rate:g}" for rate, loss in grid(curves, size, way).items())
        grids.append([f"{size}, {way}", f"{lr:g}", ", ".join(losses)])
        if not size.startswith("width"):
            time = TIMES.get((size, way), 0.0)
            step = of_seeds[0].steps[-1] / max(1.0, time)
            there = [f"{time:.2f}", f"{step:.0f}", *mean_and_spread([np.interp(step, *curve) for curve in of_seeds])]
            ends = [f"{len(of_seeds)}", *mean_and_spread([curve.losses[-1] for curve in of_seeds])]
            best.append([f"{size}, {way}", f"{lr:g}", *ends, *(there if time else [""] * 4)])
    columns = "size, optimizer|lr|seeds|loss|spread|step time / AdamW's|step in AdamW's time|loss there|spread there"
    return "\n\n".join([
        study.table(columns.split("|"), best),
        study.table(["size, optimizer", "best", "loss at each learning rate, seed 1"], grids),
        PLAN.untrained(curves),
    ])  # fmt: skip


def draw(curves: Curves, figure: Any) -> None:
    figure.set_size_inches(10, 3.6)
    names = [name for name in ("2 M", "11 M", "width") if any(run.size.startswith(name) for run in curves)]
    panels = dict(zip(names, figure.subplots(1, len(names)), strict=True))
    for size, way in dict.fromkeys(run[:2] for run in curves):
        if size.startswith("width"):
            losses = grid(curves, size, way)
            panels["width"].plot([*losses], [*losses.values()], "o-" if way == "Muon" else "x:", label=f"{size}, {way}")
        elif size in panels:
            _, of_seeds = best_of(curves, size, way)
            steps, color = of_seeds[0].steps, f"C{[*WAYS].index(way)}"
            means = [statistics.mean(losses) for losses in zip(*(curve.losses for curve in of_seeds), strict=True)]
            panels[size].plot(steps, means, color=color, label=way)
            panels[size].plot([step * TIMES.get((size, way), 1.0) for step in steps], means, ":", color=color)
    for name, axes in panels.items():
        axes.set(title="loss by learning rate" if name == "width" else f"{name}: loss by step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        axes.set_xscale("log" if name == "width" else "linear")
    panels["2 M"].set(ylabel="nats per token", xlabel="step (dotted: time, in AdamW's steps)", ylim=(3, 6))


if __name__ == "__main__":
    long_runs.main(__file__, PLAN, measure, text, draw)
