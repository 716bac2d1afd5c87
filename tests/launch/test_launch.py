"""The launcher ends with its ranks' status, passes every signal on, however often, keeps ignoring what nohup ignores,
and gives ranks the time to save.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megamix.base.processes import children_of
from megamix.base.signals import NOTED, SHUTDOWN_VARIABLE
from megamix.cli import pretrain
from megamix.launch import rendezvous
from megamix.launch.torchrun import launch
from megamix.tools.ranks import DEADLINE_S


@pytest.fixture(autouse=True)
def _handlers_and_environment_come_back(monkeypatch):
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "")  # so that it comes back as it was
    monkeypatch.delenv(SHUTDOWN_VARIABLE)
    before = {number: signal.getsignal(number) for number in NOTED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def fail_with(monkeypatch):
    """Have the ranks end, the last one first, with these exit codes."""

    def fail(*codes):
        failures = {rank: ProcessFailure(rank, 4711 + rank, code, error_file="") for rank, code in enumerate(codes)}
        for rank, failure in failures.items():
            failure.timestamp = len(codes) - rank
        monkeypatch.setattr(rendezvous, "torchrun", Mock(side_effect=ChildFailedError("megamix", failures)))

    return fail


# Below 0: a rank that was still starting dies of the request to leave, which SIGKILL is not.
@pytest.mark.parametrize(("exit_code", "status"), [(3, 3), (1, 1), (-9, 1), (75, 75), *((-n, 75) for n in NOTED)])
def test_the_first_failure_decides_the_status_and_a_killed_rank_is_named(fail_with, capsys, exit_code, status):
    fail_with(-15, exit_code)
    assert launch(["--standalone", "job"]) == status
    assert rendezvous.torchrun.call_args.args[0][-2:] == ["--standalone", "job"]
    line = "megamix: rank 1 (pid 4712) was killed by SIGKILL\n"
    assert capsys.readouterr().err == (line if exit_code == -9 else "")


@pytest.mark.parametrize(("exit_code", "killed"), [(4, False), (-9, True), (1, False)])
def test_a_rank_out_of_memory_or_killed_for_it_has_a_status_of_its_own(
    fail_with, monkeypatch, capsys, exit_code, killed
):
    fail_with(1, exit_code)  # the survivor ends by the verdict
    counts = iter([7, 8 if killed else 7])
    monkeypatch.setattr("megamix.launch.torchrun.kernel_kills", lambda: next(counts))
    assert launch(["--standalone", "job"]) == (1 if exit_code == 1 else 4)
    assert ("the kernel has killed a rank" in capsys.readouterr().err) == killed


def test_a_job_out_of_memory_ends_with_the_plan(monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(pretrain, "memory_for_each", lambda ranks: (2.0**31 / ranks, "ulimit"))
    monkeypatch.setattr(pretrain, "start_ranks", lambda *job: 4)
    monkeypatch.setattr(pretrain.train, "outlook_of", lambda *job: "")
    monkeypatch.setattr(subprocess, "run", lambda command, **settings: plans.append(command))
    nodes = {"NPROC_PER_NODE": "2", "NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    nodes |= {"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": ""}  # which it sets, and which come back as they were
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    job = ["configs/base.toml", f"checkpoint.folder={tmp_path}"]
    assert pretrain.main(job) == 4
    assert plans == [[sys.executable, "-m", "megamix", "plan", *job, "--world=6", "--device=cpu", "--memory=1024MiB"]]


@pytest.mark.parametrize("exit_code", [75, -9])
def test_torchrun_adds_no_line_to_what_is_said_of_a_rank_s_end(monkeypatch, caplog, exit_code):
    line = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: api.logger.error(line, exit_code, 0, 1, "python"))
    launch([])
    assert caplog.records == []


@pytest.mark.parametrize(("own", "told"), [(None, "3600"), ("7", "7")])
def test_ranks_are_told_the_time_to_save(monkeypatch, own, told):
    if own is not None:
        monkeypatch.setenv(SHUTDOWN_VARIABLE, own)
    seen = []
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: seen.append(os.environ[SHUTDOWN_VARIABLE]))
    assert launch([]) == 0
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
        assert rank.pid in children_of(os.getpid())
        os.kill(os.getpid(), signal.SIGUSR1)  # for which nobody is killed
        os.kill(os.getpid(), signal.SIGTERM)
        failure = ProcessFailure(0, rank.pid, rank.wait(DEADLINE_S), error_file="")
        raise ChildFailedError("megamix", {0: failure})

    monkeypatch.setenv(SHUTDOWN_VARIABLE, "1")
    monkeypatch.setattr(rendezvous, "torchrun", train)
    assert launch([]) == 75


def _noted_by(pid):
    """Return the signals for which a process has handlers."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return {number for number in NOTED if int(mask, 16) >> (number - 1) & 1}


@pytest.mark.parametrize("before", [[], ["nohup"]])
def test_before_there_are_ranks_a_signal_ends_the_launcher_but_what_nohup_has_it_ignore(before):
    command = [*before, sys.executable, "-m", "megamix.launch.torchrun", "--standalone", "nothing.py"]
    with subprocess.Popen(command) as starting:  # it has its handlers, and is importing torch
        end_s = time.monotonic() + DEADLINE_S
        while signal.SIGUSR1 not in _noted_by(starting.pid):
            assert time.monotonic() < end_s
        assert _noted_by(starting.pid) == {*NOTED} - ({signal.SIGHUP} if before else set())
        starting.terminate()
        assert starting.wait(DEADLINE_S) == 75
