"""A part of a real job on every rank, from `run_job` to its end or to where it is asked to leave.

Everything that each attempt read and left behind is written down.
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
import torch
from numpy.typing import NDArray
from torch import Tensor

from megamix.config import Config, data_source
from megamix.mixed_precision.step import StepResult
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.run.batch_plan import Attempt, GlobalBatch
from megamix.supervise.status import LeaveRequest, PreemptedError
from megamix.tools.verify.core.choices import KeptChoices
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.observed_step import ObservedStep, Poison, UsedValues, observed, rank_device
from megamix.train.job import run_job
from megamix.train.trainer import Trainer

BORDERS = (3, 6)  # updates after which a run is interrupted
STEPS = 9
# The first attempts at these updates overflow: the last ones before a save, and the first ones after it.
OVERFLOWS = frozenset(update for border in BORDERS for update in (border, border + 1))


@dataclass(frozen=True, slots=True)
class JobPart:
    """Some updates of a job, between two starts."""

    config: Config
    until: int | None = None  # the update after which the ranks are asked to leave; None: to the end
    judged: bool = False  # True: each attempt is kept whole; else only the first one's beginning and the last one's end


@dataclass(slots=True, kw_only=True)
class Seen:
    """One attempt of one rank, or the state before the first attempt of a part."""

    number: int = -1  # number in the whole run
    planted: bool = False  # True: an overflow was planted
    dp_rank: int = 0
    planned: tuple[range, ...] = ()  # samples of the global batch
    rows: NDArray[np.int64] | tuple[()] = ()  # tokens read: (samples, seq_len)
    numbers: dict[str, Any]  # losses, counters, the loss scale and its state, after the attempt
    digests: dict[str, str]  # digests of all tensors that the rank owns or holds after the attempt
    observed: ObservedStep | None

    @property
    def found_inf(self) -> bool:
        return bool(self.numbers["found_inf"])

    @property
    def update(self) -> int:
        """Return the number of the update that it was, or was tried for; from 1 on."""
        return int(self.numbers["applied_updates"]) + self.found_inf


def run_config(config: Config, layouts: Sequence[Layout], layout: Layout, folder: Path, name: str) -> Config:
    """Return the user's training as a job of STEPS updates on the data in `folder`, small enough to watch.

    It has the same global batch on all of the layouts, two epochs, and settings that only long runs would come to.
    """
    batch = math.lcm(*(one.apply(config).training.global_batch_size for one in layouts))
    # A ramp doubles its batches where the run is interrupted, with an overflow on both sides.
    ramp = ((0, batch), (BORDERS[0], 2 * batch)) if config.training.batch_ramp else ((0, batch),)
    here = layout.apply(config)
    scale, metrics, schedules = here.precision.loss_scale, here.metrics, here.optimizer.schedules
    settings = {name: one.model_copy(update=_lengths(one)) for name, one in schedules if one is not None}
    short = {"init_scale": 2.0**10, "growth_interval": 2}
    known = {key: min(value, getattr(scale, key)) for key, value in short.items() if hasattr(scale, key)}
    train, valid = ((data_source({"path": str(folder / key)}),) for key in ("train", "valid"))
    silent = {key: None for key, value in metrics if hasattr(value, "model_fields")}
    updates: dict[str, dict[str, Any]] = {
        "data": {"train": train, "valid": {"": valid}, "stages": (), "split": None, "tokenizer": None},
        "optimizer": {"schedules": schedules.model_copy(update=settings)},
        "lr_schedule": _lengths(here.lr_schedule),
        "precision": {"loss_scale": scale.model_copy(update=known), "max_retries": 3},
        "training": {
            "steps": STEPS,
            "global_batch_size": ramp[-1][1],
            "batch_ramp": ramp,
            "eval_interval": 4,
            "eval_batches": 2,
        },
        "checkpoint": {
            "folder": str(folder / name),
            "save_interval": BORDERS[0],
            "resume": "auto",
            "keep_every": 0,
            "copy_to": None,
            "copy_keep": 0,
            "copy_command": (),
        },
        "metrics": silent | {"log_interval": 1, "tensorboard": False, "precision_interval": 0},
        "profiling": {"num_steps": 0},
    }
    return here.with_keys(**updates)


def _lengths(schedule: Any) -> dict[str, int | None]:
    """Return the lengths of a schedule of any setting that fit into STEPS updates."""
    warmup, decay = min(schedule.warmup_steps, 2), schedule.decay_steps
    return {"warmup_steps": warmup, "decay_steps": None if decay is None else min(decay, STEPS - warmup)}


def watch_job(part: JobPart) -> list[Seen]:
    """Train a part of a job. Every rank of its layout must call it."""
    if (device := rank_device()).type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # as the launcher does
    seen: list[Seen] = []
    with redirect_stdout(io.StringIO()), suppress(PreemptedError):
        run_job(part.config, make=partial(_WatchedTrainer, part, seen))
    return seen


class _WatchedTrainer(Trainer):
    """Trainer that writes down each attempt's input and result, plants overflows, and leaves in time."""

    def __init__(self, part: JobPart, seen: list[Seen], *built: Any):
        super().__init__(*built)
        self._part, self._seen, self._poison = part, seen, Poison(self.engine)
        self._used, self._kept = UsedValues(), KeptChoices(self.engine.module)
        self._to_overflow = set(OVERFLOWS)
        self._rows: list[Tensor] = []

    def train(self, leave: LeaveRequest) -> float | None:
        self._write_down()
        with self.engine.observe(self._used):
            return super().train(leave)

    def _load(self, global_batch: GlobalBatch) -> Iterator[MicroBatch]:
        self._rows.clear()
        self._kept.forget()
        if self.batch_plan.launched:  # otherwise the batch probes the loss scale
            self._begin_attempt()
        for micro_batch in super()._load(global_batch):
            self._rows.append(micro_batch.batch.tokens)
            yield micro_batch

    def _begin_attempt(self) -> None:
        # The update's number if all attempts in flight are applied.
        update = self.batch_plan.launched - self.overflows.count
        self._poison.active = update in self._to_overflow
        self._to_overflow.discard(update)
        if update == self._part.until and not self._poison.active:
            self.engine.stop_request.fill_(signal.SIGTERM)  # this step sends the request to the other ranks

    def _note(self, attempt: Attempt, result: StepResult) -> None:
        super()._note(attempt, result)
        if not self._part.judged and len(self._seen) > 1:
            self._seen[-1].observed = None
        self._write_down(
            result, number=attempt.number, planted=self._poison.active, planned=attempt.batch.samples,
            dp_rank=self.engine.topology.data.rank, rows=torch.cat(self._rows).cpu().numpy(),
        )  # fmt: skip

    def _write_down(self, result: StepResult | None = None, **attempt: Any) -> None:
        whole = observed(self.engine, result, self._used, self._kept)
        tensors = {f"{part.state} of {part.spec.name}": part.values for part in [*whole.owned, *whole.copies]}
        tensors |= {f"buffer {name}": buffer.double().numpy() for name, buffer in whole.buffers.items()}
        scale = {f"loss_scale.{name}": value.tolist() for name, value in self.engine.loss_scale.state_dict().items()}
        digests = {name: hashlib.blake2b(values.tobytes()).hexdigest() for name, values in tensors.items()}
        numbers = whole.scalars | scale
        self._seen.append(Seen(numbers=numbers, digests=digests, observed=whole, **attempt))
