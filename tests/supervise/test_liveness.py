"""Junk in the ranks' store counts neither as a sign of life nor as an end reason, and a forged sign gets no other
process killed; a stopped launcher ends no run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
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

SIGN: list[Any] = [7, 0.5, 3, "forward_backward", 2, 0, "host", 4711, "12345"]
JUNK = [
    *(b"", b"null", b"[]", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 100_000),
    json.dumps(SIGN[:-1]).encode(),
    json.dumps([*SIGN, 0]).encode(),
    *(
        json.dumps([*SIGN[:place], value, *SIGN[place + 1 :]]).encode()
        for place in range(len(SIGN))
        for value in (None, True, [], -1, 2**70, math.nan, "a\x1b[2J", "a\nb", "a" * 300)
        if (place, value) != (1, 2**70)  # a long time, and no more
    ),
    *(json.dumps([*SIGN[:7], pid, SIGN[8]]).encode() for pid in (0, 1, "4711", 4711.0, 2**22 + 1)),
]


def _roll(size: int = 2) -> tuple[RollCall, dist.HashStore]:
    store = dist.HashStore()
    return RollCall(store, 0, size), store


def test_what_a_rank_writes_is_what_the_others_read() -> None:
    roll, _ = _roll()
    roll.beat(Position(3, "forward_backward", 2, 0), 0.5)
    (sign,) = roll.signs().values()
    assert sign[:6] == (1, 0.5, 3, "forward_backward", 2, 0)
    assert (sign.is_here, sign.runs) == (True, True)
    assert Sign.read(json.dumps(SIGN).encode()) == Sign(*SIGN)


@pytest.mark.parametrize("value", JUNK, ids=range(len(JUNK)))
def test_junk_is_no_sign_of_life(value: bytes) -> None:
    roll, store = _roll()
    store.set("rank 1", value)
    assert roll.signs() == {}
    assert watchdog._Suspicion(roll).missing() == [1]


@pytest.mark.parametrize("missing", [[2], [-1], ["1"], [True], [1.0], [0, 1], [[1]], None, 1, {}])
def test_junk_is_no_verdict(missing: Any) -> None:
    roll, store = _roll()
    store.set("end reason", json.dumps(["the text", missing]))
    assert roll.reason() is None
    assert roll.decide(EndReason("mine", [1])) == EndReason("mine", [1])


def test_a_verdict_cannot_steer_a_terminal() -> None:
    roll, store = _roll()
    assert (
        roll.decide(EndReason("rank 1 died\n\x1b]0;owned\x07 \ud800", [1])).text
        == "rank 1 died\n\\x1b]0;owned\\x07 \\ud800"
    )
    store.set("end reason", json.dumps(["\x1b[2J" + "x" * 20_000, []]))
    reason = roll.reason()
    assert reason is not None
    assert reason.text.startswith(r"\x1b[2Jxxx")
    assert len(reason.text) < 10_100


def test_a_forged_sign_does_not_get_a_stranger_killed() -> None:
    roll, store = _roll()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        forged = Sign(1, 0.0, 0, "", 0, 0, socket.gethostname(), stranger.pid, process_start(stranger.pid))
        store.set("rank 1", json.dumps(forged))
        assert roll.signs()[1] == forged  # all of it is true
        watchdog._end_missing(EndReason("rank 1 died", [1]), roll)
        alive = stranger.poll() is None
        stranger.kill()
    assert alive


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
