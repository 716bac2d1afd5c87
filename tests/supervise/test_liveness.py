"""A rank reads what another one has written, and ends no process but its launcher's; a stopped launcher ends no run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
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


def _roll(size: int = 2) -> tuple[RollCall, dist.HashStore]:
    store = dist.HashStore()
    return RollCall(store, 0, size), store


def test_what_a_rank_writes_is_what_the_others_read() -> None:
    roll, _ = _roll()
    roll.beat(Position(3, "forward_backward", 2, 0), 0.5)
    (sign,) = roll.signs().values()
    assert sign[:6] == (1, 0.5, 3, "forward_backward", 2, 0)
    assert (sign.is_here, sign.runs) == (True, True)
    reason = EndReason("rank 1 died\nlast in a save", [1], 4)
    assert roll.decide(reason) == roll.decide(EndReason("a later one", [])) == roll.reason() == reason


def test_a_rank_that_runs_is_not_dead_when_the_clock_has_been_set(monkeypatch: pytest.MonkeyPatch) -> None:
    sign = Sign(1, 0.0, 0, "", 0, 0, socket.gethostname(), os.getpid(), process_start(os.getpid()))
    booted_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted_s + 3600)  # as Linux tells it then
    assert sign.runs


# A launcher with two ranks and something else of the same user, and what the first rank may end of it.
_FAMILY = """
import os, signal, subprocess, sys
kill = "import sys; from megamix.supervise.processes import Siblings; siblings = Siblings(); print(flush=True)\\n"
kill += "for line in sys.stdin: print(siblings.stopped(), flush=True); siblings.end(int(line))"
sibling = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
rank = subprocess.Popen([sys.executable, "-c", kill], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
rank.stdout.readline()
later = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
sibling.send_signal(signal.SIGSTOP)
os.waitpid(sibling.pid, os.WUNTRACED)
print(sibling.pid)
for pid in (int(sys.argv[1]), 1, 0, -1, rank.pid, later.pid, sibling.pid):
    print(pid, file=rank.stdin, flush=True)
    print(rank.stdout.readline(), end="", flush=True)
rank.stdin.close()
print(sibling.wait(60), rank.wait(60), later.poll(), flush=True)
later.kill()
"""


def test_a_rank_may_end_what_its_launcher_has_started_and_nothing_else() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        family = [sys.executable, "-c", _FAMILY, str(stranger.pid)]
        said = subprocess.run(family, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True).stdout
        alive = stranger.poll() is None
        stranger.kill()
    assert alive
    sibling, *stopped, ends = said.splitlines()
    assert stopped == [f"[{sibling}]"] * 7
    assert ends == f"{-signal.SIGKILL} 0 None"


class _StoppedStore:
    """The store of a launcher that is stopped after a rank's first sign of life: no call comes back."""

    def __init__(self) -> None:
        self.given = threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.given.is_set():
            threading.Event().wait()
        self.given.set()


def _run_whose_launcher_is_stopped(folder: Path) -> str:
    """Run a rank that moves for longer than the time limit and the last resort, and ends."""
    roll = RollCall(_StoppedStore(), Topology.current().world.rank, 2)  # type: ignore[arg-type]
    clock = iter(range(10**6))
    with mock.patch.object(watchdog, "_LAST_RESORT_S", 1.0):
        moving = lambda: Position(next(clock), "training", 0, 0)  # noqa: E731
        with Watchdog(roll, 1.0, RunStatus(folder, 1), LeaveRequest(), None, moving):
            time.sleep(2.5)
    return "finished"


def test_a_run_goes_on_and_ends_while_its_launcher_is_stopped(tmp_path, run_ranks) -> None:
    assert run_ranks(_run_whose_launcher_is_stopped, 2, tmp_path) == ["finished"] * 2
    assert list(tmp_path.iterdir()) == []  # no stacks
