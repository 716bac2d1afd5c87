"""The launcher ends with its ranks' status, passes every signal on, however often, keeps ignoring what nohup ignores,
and gives ranks the time to save.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megamix.supervise import rendezvous
from megamix.supervise.launch import launch
from megamix.supervise.processes import children_of
from megamix.supervise.status import NOTED, SHUTDOWN_VARIABLE
from megamix.tools.ranks import DEADLINE_S


@pytest.fixture(autouse=True)
def _handlers_and_environment_come_back(monkeypatch):
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "")  # so that it comes back as it was
    monkeypatch.delenv(SHUTDOWN_VARIABLE)
    before = {number: signal.getsignal(number) for number in NOTED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Below 0: a rank that was still starting dies of the request to leave.
@pytest.mark.parametrize(
    ("exit_code", "status"), [(3, 3), (2, 2), (1, 1), (-9, 1), (75, 75), *((-number, 75) for number in NOTED)]
)
def test_the_first_failure_decides_the_status(monkeypatch, exit_code, status):
    def fail(arguments):
        assert arguments[-2:] == ["--standalone", "job"]
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="")
            for rank, code in ((0, -15), (1, exit_code))
        }
        failures[0].timestamp, failures[1].timestamp = 2, 1
        raise ChildFailedError("megamix", failures)

    monkeypatch.setattr(rendezvous, "torchrun", fail)
    assert launch(["--standalone", "job"]) == status


@pytest.mark.parametrize(("exit_code", "killed"), [(4, False), (-9, True), (1, False)])
def test_a_rank_out_of_memory_or_killed_for_it_ends_with_the_plan(monkeypatch, capsys, exit_code, killed):
    def fail(arguments):
        codes = {0: 1, 1: exit_code}  # the survivor ends by the verdict
        failures = {rank: ProcessFailure(rank, rank, code, error_file="") for rank, code in codes.items()}
        failures[0].timestamp, failures[1].timestamp = 2, 1
        raise ChildFailedError("megamix", failures)

    counts, plans = iter([7, 8 if killed else 7]), []
    monkeypatch.setattr(rendezvous, "torchrun", fail)
    monkeypatch.setattr("megamix.supervise.launch.kernel_kills", lambda: next(counts))
    monkeypatch.setattr("megamix.supervise.launch.memory_for_each", lambda ranks: (2.0**31 / ranks, "ulimit"))
    monkeypatch.setattr(subprocess, "run", lambda command, **settings: plans.append(command))
    job = ["job.toml", "training.steps=3"]
    many = ["--nnodes=3", "--node-rank=1", "--nproc-per-node=2", "--master-addr=node0"]
    assert launch([*many, "-m", "megamix", "train", *job]) == (1 if exit_code == 1 else 4)
    assert ("the kernel has killed a rank" in capsys.readouterr().err) == killed
    plan = [sys.executable, "-m", "megamix", "plan", *job, "--world=6", "--device=cpu", "--memory=1024MiB"]
    assert plans == ([] if exit_code == 1 else [plan])


@pytest.mark.parametrize("exit_code", [75, 2, 3, 4, 1, -9])
def test_torchrun_adds_no_line_to_what_is_said_of_a_rank_s_end(monkeypatch, caplog, exit_code):
    line = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: api.logger.error(line, exit_code, 0, 1, "python"))
    launch([])
    assert caplog.records == []


@pytest.mark.parametrize("exit_code", [1, -9, -15])
def test_a_killed_rank_is_named_with_its_signal(monkeypatch, capsys, exit_code):
    def fail(arguments):
        raise ChildFailedError("megamix", {3: ProcessFailure(1, 4711, exit_code, error_file="")})

    monkeypatch.setattr(rendezvous, "torchrun", fail)
    launch([])
    line = "megamix: rank 3 (pid 4711) was killed by SIGKILL\n"  # SIGTERM is a request to leave
    assert capsys.readouterr().err == (line if exit_code == -9 else "")


def test_ranks_that_end_well_end_well(monkeypatch):
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: None)
    assert launch([]) == 0


@pytest.mark.parametrize(("own", "told"), [(None, "3600"), ("7", "7")])
def test_ranks_are_told_the_time_to_save(monkeypatch, own, told):
    if own is not None:
        monkeypatch.setenv(SHUTDOWN_VARIABLE, own)
    seen = []
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: seen.append(os.environ[SHUTDOWN_VARIABLE]))
    launch([])
    assert seen == [told]


def _rank(program):
    """Start a child of this process, which stands for the launcher. The child's handlers are in place."""
    code = f"import signal, time; {program}; print(flush=True); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    rank.stdout.close()
    return rank


@pytest.mark.parametrize("number", NOTED)
def test_a_signal_goes_on_to_the_ranks_and_how_they_end_is_how_the_launcher_ends(monkeypatch, number):
    def train(arguments):
        rank = _rank(f"import os; signal.signal({int(number)}, lambda *_: os._exit(0))")
        for _ in range(3):  # torchrun ends at the third one, and leaves its ranks behind
            os.kill(os.getpid(), number)
        assert rank.wait(DEADLINE_S) == 0
        os.kill(os.getpid(), number)  # while other nodes are waited for

    monkeypatch.setattr(rendezvous, "torchrun", train)
    assert launch([]) == 0  # it finished, although it was asked to leave
    os.kill(os.getpid(), number)  # as srun does to a launcher that is still ending


def test_a_rank_that_does_not_leave_in_time_is_killed(monkeypatch):
    def train(arguments):
        rank = _rank("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        os.kill(os.getpid(), signal.SIGUSR1)  # for which nobody is killed
        os.kill(os.getpid(), signal.SIGTERM)
        failure = ProcessFailure(local_rank=0, pid=rank.pid, exitcode=rank.wait(DEADLINE_S), error_file="")
        raise ChildFailedError("megamix", {0: failure})

    monkeypatch.setenv(SHUTDOWN_VARIABLE, "1")
    monkeypatch.setattr(rendezvous, "torchrun", train)
    assert launch([]) == 75


def test_the_ranks_are_the_launcher_s_children():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        assert rank.pid in children_of(os.getpid())
        assert os.getppid() not in children_of(os.getpid())


def _noted_by(pid):
    """Return the signals for which a process has handlers."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return {number for number in NOTED if int(mask, 16) >> (number - 1) & 1}


def _starting(*before):
    """Start a launcher that has its handlers, and is importing torch."""
    started = subprocess.Popen(
        [*before, sys.executable, "-m", "megamix.supervise.launch", "--standalone", "nothing.py"]
    )
    end_s = time.monotonic() + DEADLINE_S
    while signal.SIGUSR1 not in _noted_by(started.pid):
        assert time.monotonic() < end_s
    return started


def test_before_there_are_ranks_a_signal_ends_the_launcher():
    with _starting() as started:
        assert _noted_by(started.pid) == set(NOTED)
        started.terminate()
        assert started.wait(DEADLINE_S) == 75


def test_what_nohup_has_it_ignore_stays_ignored():
    with _starting("nohup") as started:
        assert _noted_by(started.pid) == {*NOTED} - {signal.SIGHUP}
        started.kill()
