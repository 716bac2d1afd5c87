"""A run saves and ends when its terminal is closed or its launcher is killed, and continues under nohup and while its
launcher is stopped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from megamix.config import config_to_toml
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.end_to_end import test_leaving as leaving

ALONE = [sys.executable, "-m", "megamix", "train"]
TERMINALS = [ALONE, leaving.LAUNCH]
full_only = pytest.mark.skipif(not FULL, reason="--full: seconds of a real launcher; tests/train has its parts")


def _training(config, **how):
    """A job that trains, its launcher, and its ranks' pids."""
    job = leaving._start(config, **how)
    leaving._until(lambda: leaving._trains(job), "training")
    return job, job.launchers[0], leaving._ranks(job)


@full_only
@pytest.mark.parametrize("by_script", [False, True])
def test_under_nohup_a_run_outlives_its_terminal(tmp_path, data, by_script):
    config = leaving._config(tmp_path / "job", data, 60)
    job, launcher, ranks = _training(config, by_script=by_script, before=["nohup"])
    for pid in (launcher.pid, *ranks.values()):
        os.kill(pid, signal.SIGHUP)
    end = leaving._end(job, ranks)
    assert (end.exit_statuses, end.status["state"], end.status["update"]) == ([0], "finished", 60)


@full_only
@pytest.mark.parametrize("command", TERMINALS, ids=lambda command: command[2])
def test_a_run_whose_terminal_is_closed_saves(tmp_path, data, command):
    config = leaving._config(tmp_path / "job", data, 10**6)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/job.toml").write_text(config_to_toml(config))
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    # As a shell on a terminal, which the system tells when that is closed.
    command = ["setsid", "--ctty", *command, str(tmp_path / "job/job.toml")]
    launcher = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=leaving.ROOT, text=True)
    os.close(end)
    job, said = leaving.Job(tmp_path / "job", [launcher]), b""

    def trains():
        nonlocal said
        with contextlib.suppress(BlockingIOError):
            said += os.read(terminal, 2**16)
        return leaving._trains(job)

    leaving._until(trains, "training")
    os.close(terminal)
    assert launcher.wait(leaving.DEADLINE_S) == 75, said.decode()
    status = json.loads((tmp_path / "job/run/status.json").read_text())
    assert status["reason"].startswith(f"asked to stop (SIGHUP): ended after update {status['update']} of ")
    assert leaving._saved(tmp_path / "job") == status["update"]


@full_only
def test_a_launcher_that_was_stopped_for_long_ends_as_its_run_did(tmp_path, data):
    config = tiny_job(
        tmp_path / "job",
        tokens=data,
        valid=None,
        steps=2000,
        eval_interval=0,
        timeout_s=10.0,
        dtype="bf16",  # nobody reads its log: lines on overflows would fill the pipe, and stop the run
        log_interval=20,
    )
    job, launcher, ranks = _training(config)
    os.kill(launcher.pid, signal.SIGSTOP)
    leaving._until(lambda: not any(leaving.process_start(pid) for pid in ranks.values()), "end of the ranks")
    os.kill(launcher.pid, signal.SIGCONT)
    end = leaving._end(job, ranks)
    assert (end.exit_statuses, end.status["state"]) == ([0], "finished")


def test_a_killed_launcher_leaves_no_ranks_and_the_same_command_goes_on(tmp_path, data):
    """A user whose launcher the kernel has killed for want of memory needs the GPUs for the next start."""
    config = leaving._config(tmp_path / "job", data)
    job, launcher, ranks = _training(config)
    launcher.kill()
    end = leaving._end(job, ranks)
    assert not any(leaving.process_start(pid) for pid in ranks.values())
    assert end.status["reason"].startswith("asked to stop (a launcher died): ended after update ")
    assert leaving._saved(tmp_path / "job") == end.status["update"]
    if FULL:
        _, again, _ = _training(config)
        assert again.wait(leaving.DEADLINE_S) == 0, (end.folder / "stderr.txt").read_text()
