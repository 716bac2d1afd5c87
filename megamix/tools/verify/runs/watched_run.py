"""A real job on every rank, from `run_job` to its end or to where it is asked to leave.

What each attempt read and left behind is written down.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megamix.base.signals import LeaveRequest
from megamix.config import Config, data_source
from megamix.config.sections import CheckpointConfig
from megamix.data.token_file import token_file_writer
from megamix.launch.exit_status import PreemptedError
from megamix.mixed_precision.step import StepResult
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.observed_step import ObservedStep, Poison, UsedValues, observed, rank_device
from megamix.train.batch_plan import Attempt, GlobalBatch
from megamix.train.main import run_job
from megamix.train.trainer import Trainer

BORDER, STEPS = 3, 6  # the update after which a run is interrupted, and its last one
# The first attempts at these updates overflow: the last one before the save, and the first one after it.
OVERFLOWS = frozenset((BORDER, BORDER + 1))
# Numbers of an attempt that no layout changes; others depend on the order of sums.
_SETTLED = ("lr", "found_inf", "loss_scale", "next_loss_scale", "applied_updates", "skipped_steps")


@dataclass(slots=True)
class Seen:
    """One attempt of one rank, or the state before the first attempt of a start of its job."""

    when: str
    dp_rank: int
    samples: list[str]  # digests of the samples that were read
    settled: dict[str, str]  # numbers after the attempt that no layout changes
    facts: dict[str, str]  # other numbers, and digests of all tensors that the rank owns or holds
    observed: ObservedStep | None  # of the first and the last attempt of a start


def digest(values: Tensor) -> str:
    return f"#{hashlib.blake2b(values.numpy().tobytes(), digest_size=6).hexdigest()}"


def run_config(config: Config, layouts: Sequence[Layout], layout: Layout, folder: Path) -> Config:
    """Return the user's training as a job of STEPS updates on the data in `folder`, small enough to watch.

    It has the same global batch on all of the layouts, several epochs, and settings that only long runs would come to.
    """
    batch = math.lcm(*(one.apply(config).training.global_batch_size for one in layouts))
    # A ramp doubles its batches where the run is interrupted, with an overflow on both sides.
    ramp = ((0, batch), (BORDER, 2 * batch)) if config.training.batch_ramp else ((0, batch),)
    here = layout.apply(config)
    scale, schedules = here.precision.loss_scale, here.optimizer.schedules
    settings = {name: one.model_copy(update=_lengths(one)) for name, one in schedules if one is not None}
    short = {"init_scale": 2.0**10, "growth_interval": 2}
    known = {key: min(value, getattr(scale, key)) for key, value in short.items() if hasattr(scale, key)}
    train, valid = ((data_source({"path": str(folder / key)}),) for key in ("train", "valid"))
    sizes = {"global_batch_size": ramp[-1][1], "batch_ramp": ramp, "eval_interval": 2, "eval_batches": 2}
    saves = {key: one.default for key, one in CheckpointConfig.model_fields.items() if key.startswith(("copy", "keep"))}
    silent = {key: None for key, value in here.metrics if hasattr(value, "model_fields")}
    return here.with_keys(
        data={"train": train, "valid": {"": valid}, "stages": (), "split": None, "tokenizer": None},
        optimizer={"schedules": schedules.model_copy(update=settings)},
        lr_schedule=_lengths(here.lr_schedule),
        precision={"loss_scale": scale.model_copy(update=known), "max_retries": 3},
        training={"steps": STEPS, **sizes},
        checkpoint={
            **saves,
            "folder": str(folder / "run"),
            "save_interval": BORDER,
            "resume": "auto",
            "mirror": int(here.checkpoint.mirror > 0),
        },
        metrics=silent | {"log_interval": 1, "tensorboard": False, "precision_interval": 0},
        profiling={"num_steps": 0},
    )


def _lengths(schedule: Any) -> dict[str, int | None]:
    """Return the lengths of a schedule of any setting that fit into STEPS updates."""
    warmup, decay = min(schedule.warmup_steps, 2), schedule.decay_steps
    return {"warmup_steps": warmup, "decay_steps": None if decay is None else min(decay, STEPS - warmup)}


def write_data(config: Config, folder: Path) -> None:
    """Write tokens whose second epoch begins in the middle of the second batch, before the run is interrupted."""
    length, vocab, seed = config.model.seq_len, config.model.vocab_size, config.training.seed
    count = config.training.batch_ramp[0][1] * 3 // 2
    for key, number in (("valid", seed + 1), ("train", seed)):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, vocab, count * length + 1)
        with token_file_writer(folder / key, vocab) as writer:
            for document in np.split(tokens, np.unique(draw.integers(1, len(tokens), count))):
                writer.add(document)


def watch_job(config: Config, until: int | None = None, dies: bool = False) -> list[Seen]:
    """Train a job, to its end or until it is asked to leave after an update, or dies then. Every rank of its layout
    must call it.
    """
    if (device := rank_device()).type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # as the launcher does
    seen = list[Seen]()
    with redirect_stdout(io.StringIO()), suppress(PreemptedError):
        run_job(config, make=partial(_WatchedTrainer, until, dies, seen))
    return seen


class _Died(Exception):
    pass


class _WatchedTrainer(Trainer):
    """Trainer that writes down each attempt's input and result, plants overflows, and leaves in time."""

    def __init__(self, until: int | None, dies: bool, seen: list[Seen], *job: Any):
        super().__init__(*job)
        self._dies = dies
        self._until, self._seen, self._poison = until, seen, Poison(self.engine)
        self._used, self._to_overflow, self._rows = UsedValues(), set(OVERFLOWS), list[Tensor]()

    def run(self) -> float | None:
        with suppress(_Died):
            return super().run()
        return None  # nothing is saved

    def train(self, leave: LeaveRequest) -> float | None:
        self._write_down("the start")
        with self.engine.observe(self._used):
            return super().train(leave)

    def _load(self, global_batch: GlobalBatch) -> Iterator[MicroBatch]:
        self._rows.clear()
        if self.batch_plan.launched:  # otherwise the batch probes the loss scale
            # The update's number if all attempts in flight are applied.
            update = self.batch_plan.launched - self.overflows.count
            self._poison.active = update in self._to_overflow
            self._to_overflow.discard(update)
            if self._dies and self._until is not None and update > self._until:
                self.checkpoints.finish_mirror()
                raise _Died
            if update == self._until and not self._poison.active and not self._dies:
                self.engine.stop_request.fill_(signal.SIGTERM)  # this step sends the request to the other ranks
        for micro_batch in super()._load(global_batch):
            self._rows.append(micro_batch.batch.tokens)
            yield micro_batch

    def _note(self, attempt: Attempt, result: StepResult) -> None:
        super()._note(attempt, result)
        if len(self._seen) > 1:
            self._seen[-1].observed = None
        update = int(self.engine.applied_updates) + int(result.found_inf)
        self._write_down(f"attempt {attempt.number} (update {update})", result)

    def _write_down(self, when: str, result: StepResult | None = None) -> None:
        whole = observed(self.engine, result, self._used)
        facts = {f"{part.state} of {part.spec.name}": digest(part.values) for part in [*whole.owned, *whole.copies]}
        facts |= {f"buffer {name}": digest(buffer.double()) for name, buffer in whole.buffers.items()}
        scale = self.engine.loss_scale.state_dict()
        settled = {f"loss_scale.{name}": repr(value.tolist()) for name, value in scale.items()}
        for name, value in whole.scalars.items():
            (settled if name in _SETTLED else facts)[name] = repr(value)
        samples = [digest(row) for rows in self._rows for row in rows.cpu()]
        self._seen.append(Seen(when, whole.dp_rank, samples, settled, facts, whole))
