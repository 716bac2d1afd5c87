"""torchrun's ranks end with a status; so does the launcher, with the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megamix.train import launch as launcher
from megamix.train import rendezvous
from megamix.train.launch import launch
from megamix.train.processes import children_of
from megamix.train.signals import SHUTDOWN_VARIABLE


@pytest.fixture(autouse=True)
def _handler_and_environment_of_its_own(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "")  # so that it comes back as it was
    monkeypatch.delenv(SHUTDOWN_VARIABLE)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


# -10, -15, -2: a rank that was still starting dies of the request to leave.
@pytest.mark.parametrize(
    ("exit_code", "status"), [(3, 3), (2, 2), (1, 1), (-9, 1), (75, 75), (-10, 75), (-15, 75), (-2, 75)]
)
def test_the_first_failure_decides_the_status(monkeypatch, exit_code: int, status: int) -> None:
    def fail(arguments: list[str]) -> None:
        assert arguments[-2:] == ["--standalone", "job"]
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="")
            for rank, code in ((0, -15), (1, exit_code))
        }
        failures[0].timestamp, failures[1].timestamp = 2, 1
        raise ChildFailedError("megamix", failures)

    monkeypatch.setattr(rendezvous, "torchrun", fail)
    assert launch(["--standalone", "job"]) == status


def test_ranks_that_end_well_end_well(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: None)
    assert launch([]) == 0


@pytest.mark.parametrize(
    ("options", "own", "told"),
    [("--shutdown-timeout", None, "3600"), ("--shutdown-timeout", "7", "7"), ("", None, "30"), ("", "7", "30")],
)
def test_torchrun_and_its_ranks_are_told_the_time_to_save_where_there_is_more_than_30_s(
    monkeypatch, options: str, own: str | None, told: str
) -> None:
    if own is not None:
        monkeypatch.setenv(SHUTDOWN_VARIABLE, own)
    seen: list[str] = []
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: seen.append(os.environ[SHUTDOWN_VARIABLE]))
    parser = SimpleNamespace(format_help=lambda: options)
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", lambda: parser)
    launch([])
    assert seen == [told]


def test_a_launcher_that_was_asked_to_leave_says_so(monkeypatch) -> None:
    def interrupt(arguments: list[str]) -> None:
        raise SignalException("asked", signal.SIGTERM)

    monkeypatch.setattr(rendezvous, "torchrun", interrupt)
    assert launch([]) == 75


def test_sigusr1_goes_on_to_the_ranks_and_the_launcher_stays(monkeypatch) -> None:
    def train(arguments: list[str]) -> None:
        trap = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); print(flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", trap], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()  # its handler is in place
            ended = 2**22 + 1  # in this very moment
            monkeypatch.setattr(launcher, "children_of", lambda pid: [rank.pid, ended])
            os.kill(os.getpid(), signal.SIGUSR1)
            assert rank.wait(10) == 75

    monkeypatch.setattr(rendezvous, "torchrun", train)
    assert launch([]) == 0


def test_the_ranks_are_the_launcher_s_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        assert rank.pid in children_of(os.getpid())
        assert os.getppid() not in children_of(os.getpid())


def test_sigusr1_before_there_are_ranks_ends_the_launcher(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "torchrun", lambda arguments: os.kill(os.getpid(), signal.SIGUSR1))
    monkeypatch.setattr(launcher, "children_of", lambda pid: [])
    with pytest.raises(SystemExit) as left:
        launch([])
    assert left.value.code == 75
