"""Signs of life: messages that a run's ranks send to each other, beside their collectives."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from megamix.base.processes import process, process_start
from megamix.launch.exit_status import NoAnswerError

_SHOWN_RUNS = 8  # most runs of consecutive ranks that a message lists


class Position(NamedTuple):
    """The place of a rank's main thread in its work."""

    spans: int  # number of spans entered since the start; of two ranks that wait, the one with fewer spans is behind
    doing: str
    attempt: int
    written: int  # bytes that the save under way has written, or that a start has drawn and loaded; growth is progress


class Sign(NamedTuple):
    """A rank's last sign of life."""

    beat: int
    idle_s: float  # seconds since the last progress of its main thread
    spans: int
    doing: str
    attempt: int
    written: int
    host: str
    pid: int
    start: str
    waits: bool = False  # its main thread waits for another rank

    def __str__(self) -> str:
        return f"{self.doing}, attempt {self.attempt} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """Return whether the rank runs on this host, so that its process can be looked at."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Return whether the process of a rank on this host is neither dead nor stopped."""
        found = process(self.pid)
        return found is not None and found.start == self.start and not found.is_stopped

    def end(self) -> None:
        """Kill the rank's process, stopped or not, if it is on this host; leave a later one with its pid alone."""
        if self.is_here and process_start(self.pid) == self.start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class EndReason(NamedTuple):
    """The reason why all ranks must end."""

    text: str
    missing: list[int]  # ranks that are dead or stopped
    exit_status: int = 1  # exit status of all ranks


class RollCall:
    """Every rank's last sign of life, and the end reason of all ranks, in the store in which the ranks have met.

    A call makes only a few requests, and waits for no rank. Raises: RuntimeError if the store is gone, as when the
    launcher that held it has died.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store = store
        self._beat = 0
        self._me = (socket.gethostname(), os.getpid(), process_start(os.getpid()))

    def beat(self, position: Position, idle_s: float, *, waits: bool = False) -> None:
        self._beat += 1
        self._store.set(f"rank {self.rank}", json.dumps([self._beat, idle_s, *position, *self._me, waits]))

    def signs(self) -> dict[int, Sign]:
        """Return the signs by rank. Ranks that have given no sign so far are left out."""
        given = [rank for rank in range(self.size) if self._store.check([f"rank {rank}"])]
        return {rank: Sign(*json.loads(self._store.get(f"rank {rank}"))) for rank in given}

    def reason(self) -> EndReason | None:
        has_one = self._store.check(["end reason"])
        return EndReason(*json.loads(self._store.get("end reason"))) if has_one else None

    def decide(self, reason: EndReason) -> EndReason:
        """Return the end reason of all ranks: the first that any rank has written. If there is none yet, write
        `reason`.
        """
        return EndReason(*json.loads(self._store.compare_set("end reason", "", json.dumps(reason))))


def names(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2, 4 to 9`. A long list is cut: it ends with the number of ranks left out."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown, left = runs[:_SHOWN_RUNS], sum(map(len, runs[_SHOWN_RUNS:]))
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in shown]
    plural = "s" if sum(map(len, runs)) > 1 else ""
    return f"rank{plural} {', '.join(words)}" + (f" and {left} more" if left else "")


class Board:
    """JSON values that ranks exchange in a store, within a time limit."""

    grace_s = 2.0  # seconds within which the others read the first rank's outcome

    def __init__(self, store: Store, timeout_s: float):
        self._store, self._end_s = store, time.monotonic() + timeout_s
        self.limit = f"within {timeout_s:g} s (parallelism.timeout_s)"

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def claim(self, key: str, rank: int) -> int:
        """Return the rank that was the first to claim `key`."""
        return int(self._store.compare_set(key, "", json.dumps(rank)))

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def wait(self, keys: Sequence[str], grace_s: float = 0.0) -> bool:
        """Wait for all keys. Return whether they came in time."""
        end_s = self._end_s + grace_s
        try:
            self._store.wait(list(keys), datetime.timedelta(seconds=max(0.1, end_s - time.monotonic())))
        except RuntimeError as error:
            if time.monotonic() < end_s - 0.1:  # the store rounds its limit, and may give up 0.1 s early
                first_line = str(error).partition("\n")[0]
                raise NoAnswerError(f"the store in which the ranks have met is gone: {first_line}") from None
            return False
        return True

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that have not come in time."""
        return [] if self.wait(keys) else [place for place, key in enumerate(keys) if not self.has(key)]

    def read(self, key: str) -> Any:
        """Return the value of a key that is there already."""
        return json.loads(self._store.get(key))

    def leave(self, rank: int, size: int) -> None:
        """Note that this rank has read. The first rank waits for the others: it may hold the store, and the outcome
        would end with it.
        """
        if self._store.add("have read", 1) == size:
            self._store.set("all have read", "")
        elif rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["all have read"], datetime.timedelta(seconds=Board.grace_s))
