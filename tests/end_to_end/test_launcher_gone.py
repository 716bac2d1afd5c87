"""What becomes of a run whose terminal is closed, whose launcher is stopped, or dead while a rank is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.config import Config, config_to_toml
from tests.conftest import FULL
from tests.end_to_end import test_leaving as leaving
from tests.train.jobs import tiny_job, write_data

ALONE = [sys.executable, "-m", "megamix", "train"]
NOHUP = [["nohup", *leaving.LAUNCH], ["nohup", *leaving.SCRIPT]]
TERMINALS = [ALONE, leaving.LAUNCH]
full_only = pytest.mark.skipif(not FULL, reason="--full: seconds of a real launcher; tests/train has its parts")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def _training(command: list[str], config: Config) -> tuple[leaving.Job, dict[int, int]]:
    """A job that trains, and its ranks' pids."""
    job = leaving._start(command, config)
    leaving._until(lambda: leaving._trains(job), "training")
    return job, leaving._ranks(job.launcher.pid)


@pytest.mark.parametrize("command", NOHUP if FULL else NOHUP[:1], ids=lambda command: command[1])
def test_under_nohup_a_run_outlives_its_terminal(tmp_path, data, command: list[str]) -> None:
    job, ranks = _training(command, leaving._config(tmp_path / "job", data, 60))
    for pid in (job.launcher.pid, *ranks.values()):
        os.kill(pid, signal.SIGHUP)
    end = leaving._end(job, ranks)
    assert (end.exit_status, end.status["state"], end.status["update"]) == (0, "finished", 60)


@pytest.mark.parametrize("command", TERMINALS if FULL else TERMINALS[:1], ids=lambda command: command[2])
def test_a_run_whose_terminal_is_closed_saves(tmp_path, data, command: list[str]) -> None:
    config = leaving._config(tmp_path / "job", data, 10**6)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/job.toml").write_text(config_to_toml(config))
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    # As a shell on a terminal, which the system tells when that is closed.
    command = ["setsid", "--ctty", *command, str(tmp_path / "job/job.toml")]
    launcher = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=leaving.ROOT)
    os.close(end)
    job, said = leaving.Job(tmp_path / "job", launcher), b""

    def trains() -> bool:
        nonlocal said
        with contextlib.suppress(BlockingIOError):
            said += os.read(terminal, 2**16)
        return leaving._trains(job)

    leaving._until(trains, "training")
    os.close(terminal)
    assert launcher.wait(leaving.DEADLINE_S) == 75, said.decode()
    status = json.loads((tmp_path / "job/run/status.json").read_text())
    assert status["reason"].startswith(f"asked to leave (SIGHUP): ended after update {status['update']} of ")
    assert leaving._saved(tmp_path / "job") == status["update"]


@full_only
def test_a_launcher_that_was_stopped_for_long_ends_as_its_run_did(tmp_path, data) -> None:
    config = tiny_job(
        tmp_path / "job",
        data={"train": str(data / "train"), "valid": None},
        training={"steps": 2000, "eval_interval": 0},
        parallelism={"timeout_s": 10.0},
        metrics={"tensorboard": False, "log_interval": 20},
    )
    job, ranks = _training(leaving.LAUNCH, config)
    os.kill(job.launcher.pid, signal.SIGSTOP)
    leaving._until(lambda: not any(leaving.process_start(pid) for pid in ranks.values()), "end of the ranks")
    os.kill(job.launcher.pid, signal.SIGCONT)
    end = leaving._end(job, ranks)
    assert (end.exit_status, end.status["state"]) == (0, "finished")


@full_only
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_a_dead_launcher_is_ended_and_the_same_command_goes_on(tmp_path, data, victim: int) -> None:
    config = leaving._config(tmp_path / "job", data)
    job, ranks = _training(leaving.LAUNCH, config)
    os.kill(ranks[victim], signal.SIGSTOP)
    job.launcher.kill()
    end = leaving._end(job, ranks)
    ended = f"a launcher died, and its rank with pid {ranks[victim]} is stopped: ended"
    errors = (end.folder / "stderr.txt").read_text()
    assert ended in errors
    assert "frame #" not in errors  # a stack of C++
    if victim == 1:
        assert end.status["reason"].startswith(ended)
    again, _ = _training(leaving.LAUNCH, config)
    assert again.launcher.wait(leaving.DEADLINE_S) == 0, (end.folder / "stderr.txt").read_text()
