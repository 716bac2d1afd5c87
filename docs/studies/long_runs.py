"""Runs of a study that takes hours: what is trained next, and the curves that figures/NAME.json keeps."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import study

from megamix.config import load_config
from megamix.log.history import read_history
from megamix.train.main import run_job

SEEDS = (1, 2, 3)  # the grid is the first one's
LAST = 20  # steps whose loads count


class Run(NamedTuple):
    size: str
    way: str
    lr: float
    seed: int


class Curve(NamedTuple):
    """Validation losses, in nats per token."""

    steps: list[int]
    losses: list[float]
    load: float | None = None  # of experts: the largest over the mean, of layers and the last steps


Curves = dict[Run, Curve]


class Plan(NamedTuple):
    """A plan of runs. `grids`: learning rates by size and way, the first ones first; one whose best value is its first
    or last is continued. `train(run, texts, folder)` trains one, and goes on with what the folder holds. `of_one_seed`:
    sizes whose best value gets no other seeds.
    """

    name: str
    grids: Mapping[tuple[str, str], Sequence[float]]
    train: Callable[[Run, Path, Path], Curve]
    of_one_seed: tuple[str, ...]

    @property
    def kept(self) -> Path:
        return study.FIGURES / f"{self.name}.json"

    def read_kept(self) -> Curves:
        lines = self.kept.read_text("utf-8").splitlines() if self.kept.exists() else []
        return {Run(*run): Curve(*curve) for run, *curve in map(json.loads, lines)}

    def missing(self, curves: Curves, size: str, way: str) -> list[Run]:
        """Return what is to be trained next of one grid: its values, one more beyond an edge, or the best one's seeds.
        A grid of one value has no edge.
        """
        losses = grid(curves, size, way)
        lrs = [lr for lr in self.grids[size, way] if lr not in losses]
        if not lrs:
            best = min(losses, key=losses.__getitem__)
            edges = ((min(losses), best / 2), (max(losses), best * 2)) if len(losses) > 1 else ()
            lrs = [lr for edge, lr in edges if best == edge]
        if lrs or size in self.of_one_seed:
            return [Run(size, way, lr, SEEDS[0]) for lr in lrs]
        return [run for seed in SEEDS if (run := Run(size, way, best, seed)) not in curves]

    def train_missing(self) -> None:
        texts, curves = study.prepare_text(False, study.ROOT), self.read_kept()
        while todo := [run for size, way in self.grids for run in self.missing(curves, size, way)]:
            print(*todo[0], file=sys.stderr, flush=True)
            folder = study.ROOT / "runs" / self.name / " ".join(map(str, todo[0]))
            curves[todo[0]] = self.train(todo[0], texts, folder)
            lines = [json.dumps([run, *curve]) for run, curve in sorted(curves.items())]
            self.kept.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def untrained(self, curves: Curves) -> str:
        """Return a line that names what is not trained."""
        names = "; ".join(f"{size}, {way}" for size, way in self.grids if self.missing(curves, size, way))
        return f"Not trained to the end of the plan: {names or 'nothing'}."


def main(
    script: str,
    plan: Plan,
    measure: Callable[[bool], Any],
    text: Callable[[Any], str],
    draw: Callable[[Any, Any], None],
) -> None:
    """Run a study of long runs as a command: `train` trains what is missing, else as `study.main`."""
    if sys.argv[1:] == ["train"]:
        plan.train_missing()
    else:
        study.main(script, measure, text, draw)


def train(run: Run, file: str, settings: Sequence[str], texts: Path, folder: Path) -> Curve:
    """Train a configuration of configs/ with these settings and the run's."""
    config = load_config(
        study.ROOT / "configs" / file,
        (
            *settings, f"optimizer.lr={run.lr}", f"optimizer.min_lr={run.lr / 10}", f"training.seed={run.seed}",
            f"data.train={texts / 'train'}", f"data.valid={texts / 'valid'}", f"checkpoint.folder={folder}",
            "checkpoint.save_interval=64",
        ),
    )  # fmt: skip
    # Without a tokenizer a job writes no sample of text at its end.
    config = config.with_keys(data={"tokenizer": None})
    with contextlib.redirect_stdout(io.StringIO()):
        run_job(config)
    history = read_history(folder).valid_loss
    return Curve(history.steps, [round(loss, 4) for loss in history.values], _load(folder))


def _load(folder: Path) -> float | None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    loads = [[value for tag, value in row.items() if tag.startswith("load/max/")] for row in rows]
    last = [statistics.fmean(layers) for layers in loads if layers][-LAST:]
    return round(statistics.fmean(last), 3) if last else None


def grid(curves: Curves, size: str, way: str) -> dict[float, float]:
    """Return the last loss by learning rate, of the first seed."""
    ends = {run: curve.losses[-1] for run, curve in sorted(curves.items()) if run.seed == SEEDS[0]}
    return {run.lr: loss for run, loss in ends.items() if run[:2] == (size, way)}


def best_of(curves: Curves, size: str, way: str) -> tuple[float, list[Curve]]:
    """Return the first seed's best learning rate, and the curve of each seed at it."""
    losses = grid(curves, size, way)
    lr = min(losses, key=losses.__getitem__)
    return lr, [curve for run, curve in sorted(curves.items()) if run[:3] == (size, way, lr)]


def mean_and_spread(losses: Sequence[float]) -> list[str]:
    """Return the mean, and the standard deviation if there are several."""
    return [f"{statistics.mean(losses):.3f}", f"{statistics.stdev(losses):.3f}" if len(losses) > 1 else ""]
