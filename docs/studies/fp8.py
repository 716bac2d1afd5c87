"""Compare the quickstart with products in BF16 and in each recipe of FP8.

`python docs/studies/fp8.py [--small]` shows what figures/fp8.json keeps; `fp8.py train` trains what is missing, and may
be stopped and started again. Every run is a job as `megamix train` runs it, in BF16 on one rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import long_runs
import study
from long_runs import SEEDS, Curve, Curves, Plan, Run, mean_and_spread

SETTINGS = (
    "precision.dtype=bf16", "optimizer.compile=false", "metrics.precision_interval=0", "metrics.tensorboard=false",
    "training.global_batch_size=8",
)  # fmt: skip
LONG = "260 steps"
SIZES = {
    LONG: ("training.eval_interval=65",),
    "small": (
        "model.vocab_size=300", "model.seq_len=32", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
        "training.steps=12", "training.eval_interval=4", "training.eval_batches=2", "lr_schedule.warmup_steps=4",
    ),
}  # fmt: skip
WAYS = {"BF16": "half", "FP8, rowwise": "rowwise", "FP8, tensorwise": "tensorwise"}
LR = 8e-3


def train(run: Run, texts: Path, folder: Path) -> Curve:
    in_fp8 = () if run.way == "BF16" else (f"precision.fp8.recipe={WAYS[run.way]}",)
    settings = (*SETTINGS, *SIZES[run.size], *in_fp8)
    return long_runs.train(run, "quickstart.toml", settings, texts, folder)


PLAN = Plan("fp8", {(LONG, way): (LR,) for way in WAYS}, train, of_one_seed=())


def measure(small: bool = False) -> Curves:
    if not small:
        return PLAN.read_kept()
    with tempfile.TemporaryDirectory() as folder:
        texts = study.prepare_text(True, Path(folder))
        small_runs = [Run("small", way, LR, SEEDS[0]) for way in WAYS]
        return {run: train(run, texts, Path(folder) / WAYS[run.way]) for run in small_runs}


def text(curves: Curves) -> str:
    rows = []
    for way in WAYS:
        losses = [curve.losses[-1] for curve in of_seeds(curves, way)]
        less = differences(curves, way)
        rows.append([way, f"{len(losses)}", *mean_and_spread(losses), ", ".join(f"{of_seed:+.3f}" for of_seed in less)])
    columns = ["products", "seeds", "loss", "spread", "less that of BF16, by seed"]
    return f"{study.table(columns, rows)}\n\n{PLAN.untrained(curves)}"


def of_seeds(curves: Curves, way: str) -> list[Curve]:
    return [curve for run, curve in sorted(curves.items()) if run.way == way]


def differences(curves: Curves, way: str) -> list[float]:
    """Return the last loss less that of BF16, by seed."""
    pairs = zip(of_seeds(curves, way), of_seeds(curves, "BF16"), strict=False)
    return [one.losses[-1] - other.losses[-1] for one, other in pairs]


def draw(curves: Curves, figure: Any) -> None:
    losses, apart = figure.subplots(1, 2)
    reference = of_seeds(curves, "BF16")
    for number, way in enumerate(WAYS):
        for seed, (curve, beside) in enumerate(zip(of_seeds(curves, way), reference, strict=False)):
            label = way if seed == 0 else None
            losses.plot(curve.steps, curve.losses, color=f"C{number}", label=label)
            less = [one - other for one, other in zip(curve.losses, beside.losses, strict=True)]
            apart.plot(curve.steps, less, color=f"C{number}", label=label)
    losses.set(title="three seeds", xlabel="step", ylabel="nats per token")
    apart.set(title="less BF16 of the same seed", xlabel="step")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.legend()


if __name__ == "__main__":
    long_runs.main(__file__, PLAN, measure, text, draw)
