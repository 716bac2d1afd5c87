"""Compare the quickstart with experts to the dense one at equal operations a token, each at its best learning rate.

`python docs/studies/experts.py [--small]` shows what figures/experts.json keeps; `experts.py train` trains what is
missing, and may be stopped and started again. Every run is a job as `megamix train` runs it, in BF16 on one rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import long_runs
import study
from long_runs import SEEDS, Curve, Curves, Plan, Run, best_of, grid, mean_and_spread

SETTINGS = (
    "precision.dtype=bf16", "optimizer.compile=false", "metrics.precision_interval=0", "metrics.tensorboard=false",
    "metrics.log_interval=1", "training.global_batch_size=8", "parallelism.expert.size=1",
)  # fmt: skip
SHORT, LONG = "260 steps", "780 steps"
SIZES = {
    SHORT: ("training.eval_interval=52",),
    LONG: ("training.eval_interval=156", "training.steps=780"),
    "small": (
        "model.vocab_size=300", "model.seq_len=32", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
        "training.steps=12", "training.eval_interval=4", "training.eval_batches=2", "lr_schedule.warmup_steps=4",
    ),
}  # fmt: skip
WAYS = {"experts": "quickstart_moe.toml", "dense": "quickstart.toml"}
LRS = (8e-3, 4e-3, 16e-3)
GRIDS = {(SHORT, way): LRS for way in WAYS} | {(LONG, way): LRS[:1] for way in WAYS}


def train(run: Run, texts: Path, folder: Path) -> Curve:
    return long_runs.train(run, WAYS[run.way], (*SETTINGS, *SIZES[run.size]), texts, folder)


PLAN = Plan("experts", GRIDS, train, of_one_seed=(LONG,))


def measure(small: bool = False) -> Curves:
    if not small:
        return PLAN.read_kept()
    with tempfile.TemporaryDirectory() as folder:
        texts = study.prepare_text(True, Path(folder))
        small_runs = [Run("small", way, LRS[0], SEEDS[0]) for way in WAYS]
        return {run: train(run, texts, Path(folder) / run.way) for run in small_runs}


def text(curves: Curves) -> str:
    best, grids = [], []
    for size, way in dict.fromkeys(run[:2] for run in curves):
        lr, of_seeds = best_of(curves, size, way)
        load = "" if of_seeds[0].load is None else ", ".join(f"{curve.load:.2f}" for curve in of_seeds)
        losses = mean_and_spread([curve.losses[-1] for curve in of_seeds])
        best.append([f"{size}, {way}", f"{lr:g}", f"{len(of_seeds)}", *losses, load])
        told = (f"{loss:.3f} at {rate:g}" for rate, loss in grid(curves, size, way).items())
        grids.append([f"{size}, {way}", ", ".join(told)])
    passes = (f"{size}: {passed_at(curves, size)}" for size in dict.fromkeys(run.size for run in curves))
    return "\n\n".join([
        study.table(["size, way", "lr", "seeds", "loss", "spread", "largest load over the mean, by seed"], best),
        study.table(["size, way", "loss at each learning rate, seed 1"], grids),
        f"First step from which on every loss with experts is the lower one. {'; '.join(passes)}.",
        PLAN.untrained(curves),
    ])  # fmt: skip


def passed_at(curves: Curves, size: str) -> str:
    """Return the first step from which on the mean over seeds stays below the dense one."""
    found = {way: best_of(curves, size, way)[1] for way in WAYS if grid(curves, size, way)}
    if len(found) < len(WAYS):
        return "not trained"
    steps = found["dense"][0].steps
    pairs = zip(mean_curve(found["experts"]), mean_curve(found["dense"]), strict=True)
    not_yet = [step for step, (experts, dense) in zip(steps, pairs, strict=True) if experts >= dense]
    steps = [step for step in steps if step > max(not_yet, default=0)]
    return f"{steps[0]}" if steps else "none"


def mean_curve(of_seeds: list[Curve]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(curve.losses for curve in of_seeds), strict=True)]


def draw(curves: Curves, figure: Any) -> None:
    sizes = [*dict.fromkeys(run.size for run in curves)]
    for size, axes in zip(sizes, figure.subplots(1, len(sizes), squeeze=False)[0], strict=True):
        for way in WAYS:
            if grid(curves, size, way):
                _, of_seeds = best_of(curves, size, way)
                axes.plot(of_seeds[0].steps, mean_curve(of_seeds), label=way)
        axes.set(title=size, xlabel="step", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend()


if __name__ == "__main__":
    long_runs.main(__file__, PLAN, measure, text, draw)
