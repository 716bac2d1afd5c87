"""Signs of life: what the ranks of a run tell each other beside their collectives."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from megamix.train.processes import process, process_start


class Place(NamedTuple):
    """Where a rank's main thread stands."""

    spans: int  # entered since the start: of two ranks that wait for each other, the one with fewer is behind
    doing: str
    attempt: int
    written: int  # bytes of the checkpoint for which it waits: a slow disk is not a hang


class Sign(NamedTuple):
    """A rank's last sign of life."""

    beat: int
    idle_s: float  # since its main thread was last seen to move
    spans: int
    doing: str
    attempt: int
    written: int
    host: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.doing}, attempt {self.attempt} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """On this host, so that its process can be looked at."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Of a rank of this host: its process is neither dead nor stopped."""
        found = process(self.pid)
        return found is not None and found.start == self.start and found.state not in "ZXT"


class Verdict(NamedTuple):
    """Why all ranks must end."""

    text: str
    missing: list[int]  # ranks that are dead or stopped
    exit_status: int = 1  # of all ranks


class RollCall:
    """Every rank's last sign of life, and one verdict for all, in the store in which the ranks have met.

    A call costs a request or two, and nobody waits for anybody. Raises: RuntimeError where the store is gone, as it is
    when the launcher that held it died.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store = store
        self._beat = 0
        self._me = (socket.gethostname(), os.getpid(), process_start(os.getpid()))

    def beat(self, place: Place, idle_s: float) -> None:
        self._beat += 1
        self._store.set(f"rank {self.rank}", json.dumps([self._beat, idle_s, *place, *self._me]))

    def signs(self) -> dict[int, Sign]:
        """By rank; without those that have given none so far."""
        given = [rank for rank in range(self.size) if self._store.check([f"rank {rank}"])]
        return {rank: Sign(*json.loads(self._store.get(f"rank {rank}"))) for rank in given}

    def verdict(self) -> Verdict | None:
        return Verdict(*json.loads(self._store.get("verdict"))) if self._store.check(["verdict"]) else None

    def decide(self, verdict: Verdict) -> Verdict:
        """The first verdict is everybody's: returns that one."""
        return Verdict(*json.loads(self._store.compare_set("verdict", "", json.dumps(verdict))))


def end_here(sign: Sign) -> None:
    """Kill a rank of this host: a stopped process notices nothing, and would keep its memory and its GPU."""
    if sign.is_here and process_start(sign.pid) == sign.start:
        os.kill(sign.pid, signal.SIGKILL)
