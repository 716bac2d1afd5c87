"""A run that is asked to leave, at any instant and on any rank, ends after one update on all ranks, with its weights."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megamix.config import Config
from megamix.train import run_folder
from megamix.train.signals import PARENT_DIED, reason_words, signals_noted
from megamix.train.status import PreemptedError
from megamix.train.trainer import Trainer
from tests.conftest import FULL
from tests.train.jobs import run_on_ranks, tiny_job, write_data

STEPS, EVAL_INTERVAL = 60, 7
TRIALS = 40 if FULL else 6


def _digest(weights: dict[str, Tensor]) -> str:
    tensors = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(tensors).hexdigest()


def _config(folder: Path, data: Path, **precision: Any) -> Config:
    return tiny_job(
        folder,
        data={"train": str(data / "train"), "valid": str(data / "valid")},
        lr_schedule={"warmup_steps": 0, "decay_style": "constant"},
        precision={"dtype": "bf16"} | precision,
        training={"steps": STEPS, "eval_interval": EVAL_INTERVAL, "eval_batches": 4},
        metrics={"tensorboard": False, "precision_interval": 0},
    )


def _reference(folder: Path, data: Path) -> tuple[dict[int, str], float]:
    """An uninterrupted run: the digest of its weights after each update, and its seconds of training."""
    digests = {}
    settle = Trainer._settle

    def settle_and_look(trainer: Trainer) -> None:
        settle(trainer)
        digests[trainer.plan.applied] = _digest(trainer.engine.full_weights())

    # "redo" reads each outcome before the next attempt, so the weights are those of this update.
    with mock.patch.object(Trainer, "_settle", settle_and_look):
        run_on_ranks(_config(folder / "looked at", data, on_overflow="redo"))
    start_s = time.monotonic()
    run_on_ranks(_config(folder / "timed", data))
    return digests, time.monotonic() - start_s


def _asked(config: Config, victim: int, number: int, delay_s: float) -> str:
    """Run the job; one rank gets a signal at some instant of its training. Returns what became of it."""
    train = Trainer.train

    def train_and_be_asked(trainer: Trainer, leave: Any) -> float | None:
        if victim == (dist.get_rank() if dist.is_initialized() else 0):
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), number))
            timer.start()
            trainer.__dict__["timer"] = timer
        try:
            return train(trainer, leave)
        finally:
            if "timer" in trainer.__dict__:
                timer.cancel()
                timer.join()

    with mock.patch.object(Trainer, "train", train_and_be_asked):
        try:
            run_on_ranks(config)
        except PreemptedError as error:
            return str(error)
    return "finished"
