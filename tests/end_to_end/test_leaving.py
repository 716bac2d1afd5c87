"""Under real torchrun: a signal to anybody ends the run in good order, and no rank outlives its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from megamix.config import config_to_toml
from megamix.train.launch import parent_of
from megamix.train.liveness import process_start
from tests.conftest import FULL
from tests.ranks import DEADLINE_S
from tests.train.jobs import tiny_job, write_data

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = -1  # beside the numbers of ranks
ASKED = [(who, number) for who in (LAUNCHER, 1) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
KILLED = [(LAUNCHER, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGKILL)]
if not FULL:
    ASKED, KILLED = [(LAUNCHER, signal.SIGUSR1)], [(LAUNCHER, signal.SIGKILL)]


class Job(NamedTuple):
    folder: Path
    launcher: subprocess.Popen[str]


class Ended(NamedTuple):
    exit_status: int
    status: dict[str, Any]
    folder: Path


def _until(true: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end_s, f"not in time: {what}"
        time.sleep(0.05)


def _start(folder: Path, data: Path) -> Job:
    folder.mkdir()
    config = tiny_job(
        folder,
        data={"train": str(data / "train"), "valid": None},
        training={"steps": 1_000_000, "eval_interval": 0},
        metrics={"tensorboard": False, "log_interval": 20},
    )
    (folder / "job.toml").write_text(config_to_toml(config))
    command = [sys.executable, "-m", "megamix.train.launch", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megamix", "train", str(folder / "job.toml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "stderr.txt").open("w") as errors:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    return Job(folder, launcher)


def _ranks(launcher: int) -> dict[int, int]:
    """Pid by rank."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(path) == launcher]
    return {int((_environment(pid)).get("RANK", LAUNCHER)): pid for pid in pids}


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _end(job: Job, who: int, number: int) -> Ended:
    """Signal one process of a job that trains, and wait for the end of all."""
    metrics, launcher = job.folder / "run/metrics.jsonl", job.launcher
    _until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, f"training in {job.folder}")
    ranks = _ranks(launcher.pid)
    assert launcher.stdout is not None
    if who == LAUNCHER:
        launcher.stdout.close()  # who reads the log often dies with the launcher
    os.kill({LAUNCHER: launcher.pid, **ranks}[who], number)
    try:
        _until(lambda: launcher.poll() is not None, "end of the launcher")
        _until(lambda: not any(process_start(pid) for pid in ranks.values()), "end of the ranks")
    finally:
        for pid in (launcher.pid, *ranks.values()):
            if process_start(pid):
                os.kill(pid, signal.SIGKILL)
        launcher.stdout.close()
    return Ended(launcher.wait(), json.loads((job.folder / "run/status.json").read_text()), job.folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple[int, int], Ended]:
    base = tmp_path_factory.mktemp("jobs")
    write_data(base / "data")
    cases, results = [*ASKED, *KILLED], {}
    for first in range(0, len(cases), 2):  # two at a time
        jobs = {case: _start(base / f"{case[0]} {case[1]}", base / "data") for case in cases[first : first + 2]}
        results |= {case: _end(job, *case) for case, job in jobs.items()}
    return results


@pytest.mark.parametrize(("who", "number"), ASKED)
def test_a_signal_to_the_launcher_or_to_a_rank_ends_the_run_in_good_order(ended, who: int, number: int) -> None:
    end = ended[who, number]
    errors = (end.folder / "stderr.txt").read_text()
    assert end.exit_status == 75, errors
    assert (end.status["state"], end.status["exit_status"]) == ("preempted", 75)
    said = f"asked to leave ({signal.Signals(number).name}): ended after update {end.status['update']} of "
    assert end.status["reason"].startswith(said)
    assert errors.count(said) == 1
    assert load_file(end.folder / "run/weights.safetensors")
    assert not (end.folder / "run/run.lock").exists()


@pytest.mark.parametrize(("who", "number"), KILLED)
def test_a_killed_launcher_lets_its_ranks_save_and_a_killed_rank_is_named(ended, who: int, number: int) -> None:
    end = ended[who, number]
    if who == LAUNCHER:
        assert end.status["state"] == "preempted"
        assert end.status["reason"].startswith("asked to leave (a launcher died): ended after update ")
        assert load_file(end.folder / "run/weights.safetensors")
    else:
        assert (end.exit_status, end.status["state"], end.status["exit_status"]) == (1, "failed", 1)
        assert f"rank {who} died; rank {1 - who} was in " in end.status["reason"]
