"""Under real torchrun: a signal to anybody ends the run in good order, the same command goes on with it as if nothing
had been, and no rank outlives its launcher.
"""

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

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.config import Config, config_to_toml
from megamix.train.processes import children_of, process_start
from tests.conftest import FULL
from tests.ranks import DEADLINE_S
from tests.train.jobs import run_on_ranks, tiny_job, write_data
from tests.train.outcome import differences, end_of

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = ["launch/pretrain.sh"]
LAUNCH = [sys.executable, "-m", "megamix.train.launch", "--standalone", "--nproc-per-node=2", "-m", "megamix", "train"]

LAUNCHER, TWICE, ALL = -1, -2, -3  # beside the numbers of ranks: the launcher, once or twice; it and its ranks
ASKED = [(who, number) for who in (LAUNCHER, 1) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
# A shell and the system may both tell of a terminal that was closed.
ASKED += [(who, number) for who in (LAUNCHER, TWICE, ALL, 0, 1) for number in (signal.SIGHUP, signal.SIGQUIT)]
KILLED = [(LAUNCHER, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGKILL)]
if not FULL:
    ASKED, KILLED = [(TWICE, signal.SIGHUP)], [(LAUNCHER, signal.SIGKILL)]
STEPS = 300  # some seconds: a signal comes long before their end


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


def _config(folder: Path, data: Path, steps: int = STEPS) -> Config:
    return tiny_job(
        folder,
        data={"train": str(data / "train"), "valid": None},
        training={"steps": steps, "eval_interval": 0},
        metrics={"tensorboard": False, "log_interval": 20},
    )


def _start(command: list[str], config: Config) -> Job:
    """For the first time, or again."""
    folder = Path(config.checkpoint.folder).parent
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(config_to_toml(config))
    environment = os.environ | {"MEGAMIX_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "2"}
    with (folder / "stderr.txt").open("w") as errors:
        # The script is replaced by the launcher, which so has its pid.
        launcher = subprocess.Popen(
            [*command, str(folder / "job.toml")],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
    return Job(folder, launcher)


def _ranks(launcher: int) -> dict[int, int]:
    """Pid by rank."""
    pids = children_of(launcher)
    return {int((_environment(pid)).get("RANK", LAUNCHER)): pid for pid in pids}


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _trains(job: Job) -> bool:
    metrics = job.folder / "run/metrics.jsonl"
    return metrics.exists() and "\n" in metrics.read_text()


def _signal(job: Job, who: int, number: int) -> dict[int, int]:
    """Signal processes of a job that trains. Returns its ranks' pids."""
    launcher = job.launcher
    ranks = _ranks(launcher.pid)
    assert launcher.stdout is not None
    if who < 0:
        launcher.stdout.close()  # who reads the log often dies with the launcher
    told = {LAUNCHER: [launcher.pid], TWICE: [launcher.pid] * 2, ALL: [launcher.pid, *ranks.values()]}
    for pid in told[who] if who < 0 else [ranks[who]]:
        os.kill(pid, number)
    return ranks


def _signal_each(jobs: dict[tuple[int, int], Job]) -> dict[tuple[int, int], dict[int, int]]:
    """Signal each job as soon as it trains, since another may take long to start. Returns their ranks' pids."""
    ranks: dict[tuple[int, int], dict[int, int]] = {}

    def all_signalled() -> bool:
        ranks.update({case: _signal(job, *case) for case, job in jobs.items() if case not in ranks and _trains(job)})
        return len(ranks) == len(jobs)

    _until(all_signalled, f"training of {', '.join(str(job.folder) for job in jobs.values())}")
    return ranks


def _end(job: Job, ranks: dict[int, int]) -> Ended:
    launcher = job.launcher
    try:
        _until(lambda: launcher.poll() is not None, "end of the launcher")
        _until(lambda: not any(process_start(pid) for pid in ranks.values()), "end of the ranks")
    finally:
        for pid in (launcher.pid, *ranks.values()):
            if process_start(pid):
                os.kill(pid, signal.SIGKILL)
        if launcher.stdout is not None:
            launcher.stdout.close()
    return Ended(launcher.wait(), json.loads((job.folder / "run/status.json").read_text()), job.folder)


def _saved(folder: Path) -> int:
    """The update of the newest checkpoint."""
    return read_manifest(checkpoints(folder / "run/checkpoints")[0] / "manifest.json").applied_updates


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory, data) -> dict[tuple[int, int], Ended]:
    base = tmp_path_factory.mktemp("jobs")
    cases, results = [*ASKED, *KILLED], {}
    for first in range(0, len(cases), 2):  # two at a time
        jobs = {}
        for case in cases[first : first + 2]:
            folder = base / f"{case[0]} {case[1]}"
            # Who is killed does not go on, and so may have more to do than it ever will.
            jobs[case] = (
                _start(SCRIPT, _config(folder, data)) if case in ASKED else _start(LAUNCH, _config(folder, data, 10**6))
            )
        ranks = _signal_each(jobs)
        results |= {case: _end(job, ranks[case]) for case, job in jobs.items()}
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
    assert _saved(end.folder) == end.status["update"] < STEPS
    names = {path.name for path in (end.folder / "run").iterdir()}
    assert names == {"checkpoints", "config.toml", "metrics.jsonl", "status.json"}


@pytest.mark.parametrize(("who", "number"), ASKED)
def test_the_same_command_goes_on_as_if_nobody_had_asked(
    ended, tmp_path, data, run_ranks, who: int, number: int
) -> None:
    folder = ended[who, number].folder
    again = _start(SCRIPT, _config(folder, data))
    said, _ = again.launcher.communicate(timeout=DEADLINE_S)
    assert again.launcher.returncode == 0, (folder / "stderr.txt").read_text()
    assert f"after update {ended[who, number].status['update']}\n" in said
    run_ranks(run_on_ranks, 2, _config(tmp_path / "whole", data))
    assert differences(end_of(folder), end_of(tmp_path / "whole")) == []
    weights = [(path / "run/weights.safetensors").read_bytes() for path in (folder, tmp_path / "whole")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("who", "number"), KILLED)
def test_a_killed_launcher_lets_its_ranks_save_and_a_killed_rank_is_named(ended, who: int, number: int) -> None:
    end = ended[who, number]
    if who == LAUNCHER:
        assert end.status["state"] == "preempted"
        assert end.status["reason"].startswith("asked to leave (a launcher died): ended after update ")
        assert _saved(end.folder) == end.status["update"]
    else:
        assert (end.exit_status, end.status["state"], end.status["exit_status"]) == (1, "failed", 1)
        assert f"rank {who} died; rank {1 - who} was in " in end.status["reason"]
