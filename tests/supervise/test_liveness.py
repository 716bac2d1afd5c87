"""A rank reads what another one has written, and ends no process but a missing rank; a stopped launcher ends no run."""

import os
import signal
import socket
import subprocess
import threading
import time
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from megamix.comm.topology import Topology
from megamix.supervise import watchdog
from megamix.supervise.liveness import EndReason, Position, RollCall, Sign
from megamix.supervise.processes import process_start
from megamix.supervise.status import LeaveRequest, RunStatus
from megamix.supervise.watchdog import Watchdog
from megamix.tools.ranks import DEADLINE_S


def _roll(size=2):
    store = dist.HashStore()
    return RollCall(store, 0, size), store


def test_what_a_rank_writes_is_what_the_others_read():
    roll, _ = _roll()
    roll.beat(Position(3, "forward_backward", 2, 0), 0.5)
    (sign,) = roll.signs().values()
    assert sign[:6] == (1, 0.5, 3, "forward_backward", 2, 0)
    assert (sign.is_here, sign.runs) == (True, True)
    reason = EndReason("rank 1 died\nlast in a save", [1], 4)
    assert roll.decide(reason) == roll.decide(EndReason("a later one", [])) == roll.reason() == reason


def test_a_rank_that_runs_is_not_dead_when_the_clock_has_been_set(monkeypatch):
    sign = Sign(1, 0.0, 0, "", 0, 0, socket.gethostname(), os.getpid(), process_start(os.getpid()))
    booted_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted_s + 3600)  # as Linux tells it then
    assert sign.runs


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_missing_rank_is_killed_also_if_it_is_stopped_and_a_later_process_with_its_pid_is_not(is_stopped):
    with subprocess.Popen(["sleep", "60"]) as rank:
        if is_stopped:
            rank.send_signal(signal.SIGSTOP)
        host, start = socket.gethostname(), process_start(rank.pid)
        for other_host, other_start in (("elsewhere", start), (host, "1.00"), (host, "")):
            Sign(1, 0.0, 0, "", 0, 0, other_host, rank.pid, other_start).end()
        assert process_start(rank.pid) == start
        Sign(1, 0.0, 0, "", 0, 0, host, rank.pid, start).end()
        assert rank.wait(DEADLINE_S) == -signal.SIGKILL


class _StoppedStore:
    """The store of a launcher that is stopped after a rank's first sign of life: no call comes back."""

    def __init__(self):
        self.given = threading.Event()

    def set(self, key, value):
        if self.given.is_set():
            threading.Event().wait()
        self.given.set()


def _run_whose_launcher_is_stopped(folder):
    """Run a rank that moves for longer than the time limit and the last resort, and ends."""
    roll = RollCall(_StoppedStore(), Topology.current().world.rank, 2)  # type: ignore[arg-type]
    clock = iter(range(10**6))
    with mock.patch.object(watchdog, "_LAST_RESORT_S", 1.0):
        moving = lambda: Position(next(clock), "training", 0, 0)  # noqa: E731
        with Watchdog(roll, 1.0, RunStatus(folder, 1), LeaveRequest(), None, moving):
            time.sleep(2.5)
    return "finished"


def test_a_run_goes_on_and_ends_while_its_launcher_is_stopped(tmp_path, run_ranks):
    assert run_ranks(_run_whose_launcher_is_stopped, 2, tmp_path) == ["finished"] * 2
    assert list(tmp_path.iterdir()) == []  # no stacks
