"""A run that is asked to leave, at any instant and on any rank, ends after one update on all ranks and is saved."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megamix.config import Config
from megamix.data.loader import BatchLoader
from megamix.data.sampler import Samples
from megamix.train import run_folder
from megamix.train.signals import NOTED, PARENT_DIED, LeaveRequest, reason_words, signals_noted
from megamix.train.status import PreemptedError
from megamix.train.trainer import Trainer
from tests.conftest import FULL
from tests.train.jobs import counted_calls, run_on_ranks, tiny_job, write_data

STEPS, EVAL_INTERVAL = 40, 7
TRIALS = 40 if FULL else 6


def _digest(weights: dict[str, Tensor]) -> str:
    """Of the set of tensors: a tied one has two names in the engine and one in the file."""
    tensors = {hashlib.sha256(tensor.numpy().tobytes()).digest() for tensor in weights.values()}
    return hashlib.sha256(b"".join(sorted(tensors))).hexdigest()


def _config(folder: Path, data: Path, **precision: Any) -> Config:
    return tiny_job(
        folder,
        data={"train": str(data / "train"), "valid": str(data / "valid")},
        lr_schedule={"warmup_steps": 0, "decay_style": "constant"},
        precision={"dtype": "bf16"} | precision,
        training={"steps": STEPS, "eval_interval": EVAL_INTERVAL, "eval_batches": 4},
        metrics={"tensorboard": False, "precision_interval": 0},
    )


def _reference(folder: Path, data: Path) -> tuple[dict[int, str], int]:
    """An uninterrupted run: the digest of its weights after each update, and how many calls its training makes."""
    digests = {}
    settle = Trainer._settle

    def settle_and_look(trainer: Trainer) -> None:
        settle(trainer)
        digests[trainer.plan.applied] = _digest(trainer.engine.full_weights())

    # "redo" reads each outcome before the next attempt, so the weights are those of this update.
    with mock.patch.object(Trainer, "_settle", settle_and_look):
        run_on_ranks(_config(folder / "looked at", data, on_overflow="redo"))
    seen = []
    train = Trainer.train

    def train_counted(trainer: Trainer, leave: LeaveRequest) -> float | None:
        with counted_calls(seen.append):
            return train(trainer, leave)

    with mock.patch.object(Trainer, "train", train_counted):
        run_on_ranks(_config(folder / "counted", data))
    return digests, len(seen)


def _asked(config: Config, victim: int, number: int, at_call: int) -> tuple[str, int]:
    """Run the job; one rank gets a signal at some call in its training. Returns what became of it, and how many
    attempts that rank had begun by then (0 on the other one).
    """
    train, begun = Trainer.train, 0

    def train_and_be_asked(trainer: Trainer, leave: LeaveRequest) -> float | None:
        def ask(call: int) -> None:
            nonlocal begun
            if call == at_call:
                begun = trainer.plan.launched
                os.kill(os.getpid(), number)

        if victim != trainer.engine.collectives.topology.dp_rank:
            return train(trainer, leave)
        with counted_calls(ask):
            return train(trainer, leave)

    with mock.patch.object(Trainer, "train", train_and_be_asked):
        return _outcome(config), begun


def _outcome(config: Config) -> str:
    try:
        run_on_ranks(config)
    except PreemptedError as error:
        return str(error)
    return "finished"


def _status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/status.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder / "data")
    return folder / "data"


@pytest.fixture(scope="module")
def reference(tmp_path_factory, data, run_ranks) -> list[tuple[dict[int, str], int]]:
    return run_ranks(_reference, 2, tmp_path_factory.mktemp("reference"), data)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_signal_at_any_instant_to_any_rank_ends_all_at_once_after_one_update(
    tmp_path, data, run_ranks, reference, trial: int
) -> None:
    rng = random.Random(trial)
    victim, number = rng.randrange(2), rng.choice(NOTED)
    digests, calls = reference[victim]
    # The last attempts are left out: their outcomes come too late for anything but the end of the run.
    answers = run_ranks(_asked, 2, _config(tmp_path, data), victim, number, rng.randrange(int(0.9 * calls)))
    (first, second), begun = [said for said, _ in answers], answers[victim][1]
    assert first == second
    assert first.startswith(f"asked to leave ({number.name}): ended after update ")
    status = _status(tmp_path)
    assert (status["state"], status["exit_status"], status["steps"]) == ("preempted", 75, STEPS)
    assert status["reason"] == first
    # Where the signal is seen another attempt begins; its outcome, with the request in it, is read two attempts later.
    assert status["update"] <= begun + 3
    assert _digest(load_file(tmp_path / "run/weights.safetensors")) == digests[status["update"]]
    assert not (tmp_path / "run/run.lock").exists()


def _asked_in_validation(config: Config) -> tuple[str, int]:
    """The second rank is asked while it computes a validation batch; how many it computes in all."""
    batches = 0
    load = Trainer._load

    def load_and_be_asked(trainer: Trainer, loader: BatchLoader, samples: Samples) -> Any:
        nonlocal batches
        if loader is trainer.validation:
            batches += 1
            if trainer.engine.collectives.topology.dp_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
        return load(trainer, loader, samples)

    with mock.patch.object(Trainer, "_load", load_and_be_asked):
        return _outcome(config), batches


def test_a_validation_ends_between_two_batches(tmp_path, data, run_ranks, reference) -> None:
    (first, batches), (second, same) = run_ranks(_asked_in_validation, 2, _config(tmp_path, data))
    assert first == second
    assert f"(SIGUSR1): ended after update {EVAL_INTERVAL} of" in first
    assert batches == same == 2  # one global batch is two micro-batches a rank; four were to come
    assert _digest(load_file(tmp_path / "run/weights.safetensors")) == reference[0][0][EVAL_INTERVAL]


def _asked_while_saving(config: Config) -> tuple[str, int]:
    write = run_folder.write_weights

    def write_and_be_asked(path: Path, weights: dict[str, Tensor]) -> None:
        for number in (*NOTED, *NOTED):
            os.kill(os.getpid(), number)
        write(path, weights)

    with mock.patch.object(run_folder, "write_weights", write_and_be_asked):
        return _asked(config, victim=0, number=signal.SIGTERM, at_call=0)


def test_signals_while_saving_change_nothing(tmp_path, data, run_ranks, reference) -> None:
    run_ranks(_asked_while_saving, 2, _config(tmp_path, data))
    status = _status(tmp_path)
    assert (status["state"], "SIGTERM" in status["reason"]) == ("preempted", True)
    assert _digest(load_file(tmp_path / "run/weights.safetensors")) == reference[0][0][status["update"]]


def test_a_run_that_ends_says_so(tmp_path, data) -> None:
    assert _outcome(_config(tmp_path, data)) == "finished"
    status = _status(tmp_path)
    assert (status["state"], status["exit_status"], status["update"]) == ("finished", 0, STEPS)


def test_a_run_that_fails_says_why(tmp_path, data) -> None:
    with mock.patch.object(Trainer, "_log", side_effect=OSError("disk full")), pytest.raises(OSError, match="full"):
        run_on_ranks(_config(tmp_path, data))
    status = _status(tmp_path)
    assert (status["state"], status["exit_status"], status["update"]) == ("failed", 1, 1)
    assert status["reason"] == "OSError: disk full"


def test_a_signal_is_only_noted_and_the_first_reason_stays() -> None:
    with signals_noted() as leave:
        assert leave.reason == 0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert leave.reason == signal.SIGTERM
        leave.ask(PARENT_DIED)
        assert reason_words(leave.reason) == "SIGTERM"
    assert reason_words(PARENT_DIED) == "a launcher died"


def _interrupt_three_times() -> None:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_third_interrupt_aborts_and_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in NOTED]
    with pytest.raises(KeyboardInterrupt), signals_noted():
        _interrupt_three_times()
    assert [signal.getsignal(number) for number in NOTED] == before
