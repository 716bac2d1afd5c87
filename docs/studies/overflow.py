"""Compare the losses, and the fates of batches, under each way to choose FP16's loss scale.

`python docs/studies/overflow.py [--small]`. Every run is a job as `megamix train` runs it: the quickstart, smaller, and
what RUNS adds to it. The numbers are those that the job itself writes and says.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import study

from megamix.config import Config, load_config
from megamix.log.history import RunHistory, read_history
from megamix.log.overflows import GaveUpError
from megamix.model.family import parameter_count
from megamix.train.batch_plan import StepOutcome
from megamix.train.main import run_job

SETTINGS = (
    "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
    "training.eval_interval=0", "optimizer.compile=false", "metrics.log_interval=1", "metrics.tensorboard=false",
)  # fmt: skip
SMALL = (
    "model.vocab_size=300", "model.seq_len=32", "training.micro_batch_size=4", "training.global_batch_size=4",
    "training.steps=24", "training.eval_batches=4", "lr_schedule.warmup_steps=4",
    "precision.loss_scale.growth_interval=4",
)  # fmt: skip
FULL = (
    "model.seq_len=128", "training.micro_batch_size=8", "training.global_batch_size=8",
    "training.steps=150", "training.eval_batches=16", "precision.loss_scale.growth_interval=10",
)  # fmt: skip


def _static(scale: float) -> tuple[str, ...]:
    return "precision.loss_scale.rule=static", f"precision.loss_scale.init_scale={scale}"


REFERENCE = "FP32"
RUNS = {
    REFERENCE: ("precision.dtype=fp32",),
    "FP32, another seed": ("precision.dtype=fp32", "training.seed=5"),
    "FP16 without a scale": _static(1.0),
    "static 2^-4": _static(2.0**-4),
    "static 2^-6": _static(2.0**-6),
    "static 2^16, skip": (*_static(2.0**16), "precision.on_overflow=skip"),
    "static 2^20, requeue": _static(2.0**20),
    "static 2^24, requeue": _static(2.0**24),
    "dynamic, skip": ("precision.on_overflow=skip",),
    "dynamic, requeue": (),
    "dynamic, redo": ("precision.on_overflow=redo",),
    "headroom, requeue": ("precision.loss_scale.rule=headroom", "precision.loss_scale.init_scale=1"),
}


class Run(NamedTuple):
    history: RunHistory
    on_overflow: str
    fates: dict[StepOutcome, int]  # of the attempts that overflowed

    @property
    def applied(self) -> int:
        """Updates."""
        return len(self.history.loss.steps)

    @property
    def overflowed(self) -> int:
        """Attempts."""
        return len(self.history.overflows.steps)


class Findings(NamedTuple):
    num_params: int
    tokens: int  # in a batch
    steps: int
    runs: dict[str, Run]


def measure(small: bool = False) -> Findings:
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        texts = study.prepare_text(small, Path(folder))
        for name, overrides in RUNS.items():
            config = load_config(
                study.ROOT / "configs/quickstart_adamw.toml",
                (
                    *SETTINGS, *(SMALL if small else FULL), *overrides,
                    f"data.train={texts / 'train'}", f"data.valid={texts / 'valid'}",
                    f"checkpoint.folder={Path(folder) / name}",
                ),
            )  # fmt: skip
            # Without a tokenizer a job writes no sample of text at its end.
            runs[name] = train(config.with_keys(data={"tokenizer": None}))
    return Findings(
        parameter_count(config.model), config.training.global_batch_size * config.model.seq_len,
        config.training.steps, runs,
    )  # fmt: skip


def train(config: Config) -> Run:
    with contextlib.redirect_stdout(io.StringIO()) as log, contextlib.suppress(GaveUpError):
        run_job(config)
    # An overflow has a line, which says what becomes of its batch; those of the search for the first scale share one.
    fates = {fate: log.getvalue().count(f" {fate.value} | overflows ") for fate in StepOutcome}
    searches = re.findall(r"^loss scale: .* in (\d+) tr", log.getvalue(), flags=re.MULTILINE)
    fates[StepOutcome.REQUEUED] += sum(map(int, searches))
    return Run(read_history(Path(config.checkpoint.folder)), config.precision.on_overflow, fates)


def text(findings: Findings) -> str:
    reference = findings.runs[REFERENCE].history.valid_loss.values[-1]
    rows = []
    for name, run in findings.runs.items():
        losses, scales = run.history.valid_loss.values, run.history.loss_scale.values
        rows.append([
            name,
            *([f"{losses[-1]:.3f}", f"{losses[-1] - reference:+.3f}"] if losses else ["gave up", ""]),
            f"{run.applied + run.overflowed}",
            f"{run.overflowed}",
            f"{run.fates[StepOutcome.LOST]}",
            *(f"{run.fates[StepOutcome.REQUEUED] if run.on_overflow == way else 0}" for way in ("requeue", "redo")),
            f"{run.fates[StepOutcome.SET_ASIDE]}",
            f"2^{math.log2(scales[-1]):.0f}" if scales else "",
        ])  # fmt: skip
    columns = [
        "run", "validation loss", "from FP32's", "attempts", "overflowed", "lost", "requeued", "redone",
        "set aside", "last scale",
    ]  # fmt: skip
    heading = (
        f"{findings.num_params / 1e6:.2f} M parameters, {findings.steps} updates, {findings.tokens:,} tokens a batch."
    )
    return f"{heading}\n\n{study.table(columns, rows)}"


def draw(findings: Findings, figure: Any) -> None:
    figure.set_size_inches(10, 3.6)
    loss, scale = figure.subplots(1, 2)
    for name, run in findings.runs.items():
        history = run.history
        style = "k-" if name == REFERENCE else "k:" if name.startswith("FP32") else "-"
        means = [sum(history.loss.values[end - 10 : end]) / 10 for end in range(10, run.applied + 1, 10)]
        order = 3 if name == REFERENCE else 2  # the reference on top
        (line,) = loss.plot(range(10, run.applied + 1, 10), means, style, linewidth=1, label=name, zorder=order)
        scale.plot(
            history.loss_scale.steps, history.loss_scale.values, drawstyle="steps-post", linewidth=1,
            color=line.get_color(),
        )  # fmt: skip
        scale.plot(history.overflows.steps, history.overflows.values, "x", color=line.get_color(), markersize=4)
    loss.set(title="training loss, mean of 10 updates", xlabel="update", ylabel="nats per token")
    scale.set(title="loss scale (x: overflow)", xlabel="update")
    scale.set_yscale("log", base=2)
    for axes in (loss, scale):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)


if __name__ == "__main__":
    study.main(__file__, measure, text, draw)
