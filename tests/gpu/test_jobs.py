"""Whole jobs on simulated GPUs: 50 steady steps make the host wait for the device in the readout alone, and each of
twelve planted waits is told; a run that a signal ends goes on to the bits of one that none ended, and can be evaluated
and exported; a rank that hangs is named.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megamix.cli import main
from megamix.config import Config
from megamix.train.batch_plan import Attempt, BatchPlan
from megamix.train.trainer import Trainer
from tests.gpu.pools import processes_with_gpus
from tests.supervise import test_signals, test_watchdog
from tests.train.jobs import Record, attempts_recorded, run_on_ranks, tiny_job, write_data
from tests.train.outcome import differences, end_of

Waits = Counter[tuple[str, str]]
FIRST, STEPS = 4, 50
READOUT = "synchronize of an event", "megamix/train/report.py"


def _steady_waits(config: Config) -> list[str]:
    """Return what has made the host wait for the device within STEPS attempts of a job, but for the readout."""
    from tests.gpu import simulated

    seen: list[Waits] = []

    def note(plan: BatchPlan) -> None:
        if plan.launched in (FIRST, FIRST + STEPS):
            seen.append(simulated.waits.copy())

    with attempts_recorded(Record(), note):
        run_on_ranks(config)
    before, after = seen
    waits = after - before
    assert sum(count for (what, place), count in waits.items() if what == READOUT[0] and READOUT[1] in place) == STEPS
    return [f"{what} at {place}" for what, place in waits if what != READOUT[0] or READOUT[1] not in place]


PLANTS: dict[str, Callable[[Tensor], Any]] = {
    "host read: _local_scalar_dense": lambda t: t.sum().item(),
    "host read: nonzero": lambda t: t.nonzero(),
    "host read: index by a mask": lambda t: t[t > 0],
    "host read: masked_select": lambda t: t.masked_select(t > 0),
    "host read: equal": lambda t: torch.equal(t, t),
    "host read: _unique2": lambda t: t.unique(),
    "host read: copy_ to the host": lambda t: t.tolist(),
    "copy from pageable memory: copy_ to the device": lambda t: t.copy_(torch.zeros(3), non_blocking=True),
    "copy from pageable memory: an index": lambda t: t[torch.tensor([0, 2])],
    "blocking copy: copy_ to the device": lambda t: torch.zeros(3, pin_memory=True).to(t.device),
    "synchronize of an event": lambda t: _synchronize(),
    "synchronize of a device": lambda t: torch.cuda.synchronize(),
}


def _synchronize() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def _planted_waits(config: Config) -> list[str]:
    right, plants = Trainer._try, iter(PLANTS.values())

    def wrong(self: Trainer, attempt: Attempt) -> None:
        right(self, attempt)
        if attempt.number >= FIRST and (plant := next(plants, None)) is not None:
            plant(torch.ones(3, device=self.device))

    with mock.patch.object(Trainer, "_try", wrong):
        return _steady_waits(config)


def _steady_job(folder: Path) -> Config:
    write_data(folder / "data")
    return tiny_job(
        folder,
        data={"valid": None},
        precision={"loss_scale": {"rule": "static", "init_scale": 2.0**8}},
        training={"steps": FIRST + STEPS + 1, "eval_interval": 0},
        metrics={"log_interval": 1000},
    )


def test_steady_steps_make_the_host_wait_in_the_readout_alone(gpu_ranks, tmp_path: Path) -> None:
    assert gpu_ranks(_steady_waits, 2, _steady_job(tmp_path)) == [[], []]


def test_each_planted_wait_is_told(gpu_ranks, tmp_path: Path) -> None:
    (told,) = gpu_ranks(_planted_waits, 1, _steady_job(tmp_path))
    assert [kind for kind in PLANTS if not any(line.startswith(kind) for line in told)] == []


def _use(run: Path, out: Path) -> list[int]:
    """Return the exit statuses of what is done with a run behind its end."""
    return [main(["evaluate", str(run), "--stride", "32"]), main(["export", str(run), "--to", "hf", str(out)])]


def test_a_run_that_a_signal_ends_goes_on_to_the_bits_of_one_that_none_ended(gpu_ranks, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    for name in ("whole", "asked"):
        (tmp_path / name).mkdir()
    whole, asked = (test_signals._config(tmp_path / name, tmp_path / "data") for name in ("whole", "asked"))
    assert gpu_ranks(test_signals._outcome, 2, whole) == ["finished"] * 2
    said = gpu_ranks(test_signals._asked, 2, asked, "validating", 1, 0, signal.SIGTERM, seed=1)
    assert all("(SIGTERM): ended after update" in each.outcome for each in said)
    assert gpu_ranks(test_signals._outcome, 2, asked, seed=2) == ["finished"] * 2
    assert differences(end_of(tmp_path / "asked"), end_of(tmp_path / "whole")) == []
    assert gpu_ranks(_use, 1, tmp_path / "asked/run", tmp_path / "hf") == [[0, 0]]


def test_a_rank_that_hangs_is_named_and_ends_all(gpu_ranks, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    with processes_with_gpus():
        ranks = test_watchdog._start(tmp_path / "hangs", tmp_path / "data", test_watchdog._asleep, 1, 5.0)
    end = test_watchdog._ended(ranks)
    assert "NCCL" in ranks.said(0)
    assert end.statuses == [1, 1]
    assert test_watchdog._verdict(test_watchdog._asleep, 1) in end.status["reason"]
