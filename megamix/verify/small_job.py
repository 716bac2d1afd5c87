"""The user's training as a job that is small enough to watch, and its data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megamix.config import Config, data_source
from megamix.data.token_file import TokenFileWriter
from megamix.verify.data_order import DataOrder
from megamix.verify.layouts import Layout
from megamix.verify.watched_run import BORDERS, STEPS


def run_config(config: Config, layouts: Sequence[Layout], layout: Layout, folder: Path, name: str) -> Config:
    """Return the user's training as a job of STEPS updates on the data in `folder`, small enough to watch: the same
    global batch on all of the layouts, two epochs, and settings that only long runs would come to.
    """
    micro = config.training.micro_batch_size
    batch = math.lcm(*(one.apply(config).training.global_batch_size for one in layouts))
    here = layout.apply(config, batch // (micro * layout.size("dp")))
    schedule, scale, metrics = here.lr_schedule, here.precision.loss_scale, here.metrics
    warmup = min(schedule.warmup_steps, 2)
    decay = None if schedule.decay_steps is None else min(schedule.decay_steps, STEPS - warmup)
    short = {"init_scale": 2.0**10, "growth_interval": 2}
    known = {key: min(value, getattr(scale, key)) for key, value in short.items() if hasattr(scale, key)}
    sources = {key: (data_source({"path": str(folder / key)}),) for key in ("train", "valid")}
    silent = {key: None for key, value in metrics if hasattr(value, "model_fields")}
    updates: dict[str, dict[str, Any]] = {
        "data": sources | {"stages": (), "split": None, "tokenizer": None},
        "lr_schedule": {"warmup_steps": warmup, "decay_steps": decay},
        "precision": {"loss_scale": scale.model_copy(update=known), "max_retries": 3},
        "training": {"steps": STEPS, "eval_interval": 4, "eval_batches": 2},
        "checkpoint": {"folder": str(folder / name), "save_interval": BORDERS[0], "resume": "auto"},
        "metrics": silent | {"log_interval": 1, "tensorboard": False, "precision_interval": 0},
        "profiling": {"num_steps": 0},
    }
    return here.model_copy(update={key: getattr(here, key).model_copy(update=new) for key, new in updates.items()})


def write_data(config: Config, batch: int, folder: Path) -> DataOrder:
    """Write tokens of which a run reads two epochs, the first one up to the middle of its fifth batch."""
    length, vocab, seed = config.model.seq_len, config.model.vocab_size, config.training.seed
    count = batch * STEPS // 2
    for key, number in (("valid", seed + 1), ("train", seed)):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, vocab, count * length + 1)
        with TokenFileWriter(folder / key, vocab) as writer:
            for document in np.split(tokens, np.unique(draw.integers(1, len(tokens), count))):
                writer.add(document)
    return DataOrder(tokens[:-1].reshape(count, length).astype(np.int64), seed)
