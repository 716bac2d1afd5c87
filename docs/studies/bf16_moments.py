"""Compare the effect of BF16 moments of AdamW on the loss with the effect of another seed.

`python docs/studies/bf16_moments.py [--small]`. Every run is a job as `megamix train` runs it: the quickstart in BF16
on one rank. Runs of one seed begin with the same weights and read the same samples in the same order.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import study

from megamix import AdamW
from megamix.config import Config, load_config
from megamix.log.history import read_history
from megamix.model.family import parameter_count
from megamix.plugins import OPTIMIZERS
from megamix.train.main import run_job

SETTINGS = (
    "precision.dtype=bf16", "training.micro_batch_size=1", "training.global_batch_size=1", "training.eval_interval=0",
    "optimizer.compile=false", "metrics.log_interval=10", "metrics.precision_interval=0", "metrics.tensorboard=false",
)  # fmt: skip
SMALL = (
    "model.vocab_size=300", "model.seq_len=32", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2",
    "training.steps=20", "training.eval_batches=4", "lr_schedule.warmup_steps=4",
)  # fmt: skip
FULL = ("training.steps=2000", "training.eval_batches=256")


@dataclass(frozen=True, kw_only=True)
class ToNearest(AdamW):
    """AdamW that rounds no moment by chance."""

    @property
    def takes_chances(self) -> bool:
        return False


class Way(NamedTuple):
    """One way to keep the moments."""

    moments: str
    beta2: float
    state_dtype: str
    optimizer: type[AdamW] = AdamW


WAYS = (
    Way("FP32", 0.95, "fp32"),
    Way("BF16", 0.95, "bf16"),
    Way("FP32", 0.999, "fp32"),
    Way("BF16", 0.999, "bf16"),
    Way("BF16, to nearest", 0.999, "bf16", ToNearest),
)
SEEDS = (1, 2, 3)


class Findings(NamedTuple):
    num_params: int
    tokens: int  # in a batch
    steps: int
    losses: dict[Way, list[float]]  # of validation, at the end, by seed


def measure(small: bool = False) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        texts = study.prepare_text(small, Path(folder))
        losses = {way: [train(way, make_config(way, seed, small, texts, folder)) for seed in SEEDS] for way in WAYS}
        config = make_config(WAYS[0], SEEDS[0], small, texts, folder)
    tokens = config.training.global_batch_size * config.model.seq_len
    return Findings(parameter_count(config.model), tokens, config.training.steps, losses)


def make_config(way: Way, seed: int, small: bool, texts: Path, folder: str) -> Config:
    config = load_config(
        study.ROOT / "configs/quickstart_adamw.toml",
        (
            *SETTINGS, *(SMALL if small else FULL), f"training.seed={seed}",
            f"optimizer.adamw.betas=[0.9, {way.beta2}]", f"optimizer.adamw.state_dtype={way.state_dtype}",
            f"data.train={texts / 'train'}", f"data.valid={texts / 'valid'}",
            f"checkpoint.folder={folder}/{way.moments} {way.beta2} {seed}",
        ),
    )  # fmt: skip
    # Without a tokenizer a job writes no sample of text at its end.
    return config.with_keys(data={"tokenizer": None})


def train(way: Way, config: Config) -> float:
    """Return the last validation loss."""
    with mock.patch.dict(OPTIMIZERS.registered, adamw=way.optimizer), contextlib.redirect_stdout(io.StringIO()):
        run_job(config)
    return read_history(Path(config.checkpoint.folder)).valid_loss.values[-1]


def reference_of(way: Way) -> Way:
    """FP32 moments with the same beta2."""
    return next(other for other in WAYS if other.beta2 == way.beta2 and other.state_dtype == "fp32")


def difference(findings: Findings, way: Way) -> float:
    """From FP32 moments, the mean over pairs of one seed."""
    pairs = zip(findings.losses[way], findings.losses[reference_of(way)], strict=True)
    return statistics.mean(loss - reference for loss, reference in pairs)


def spread(findings: Findings, way: Way) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(findings.losses[way])


def text(findings: Findings) -> str:
    rows = []
    for way, losses in findings.losses.items():
        reference = reference_of(way)
        rows.append([
            f"{way.moments}, beta2 {way.beta2}",
            *(f"{loss:.4f}" for loss in losses),
            f"{statistics.mean(losses):.4f}",
            "" if way == reference else f"{difference(findings, way):+.4f}",
            f"{spread(findings, reference):.4f}",
        ])  # fmt: skip
    columns = [
        "validation loss", *(f"seed {seed}" for seed in SEEDS), "mean",
        "from FP32's, mean of pairs", "FP32's spread over seeds",
    ]  # fmt: skip
    heading = (
        f"{findings.num_params / 1e6:.2f} M parameters, {findings.steps:,} updates, {findings.tokens:,} tokens a batch."
    )
    return f"{heading}\n\n{study.table(columns, rows)}"


if __name__ == "__main__":
    study.main(__file__, measure, text)
