"""Journal of a run: events.jsonl, which each start continues and never cuts but for a line that a kill left unfinished,
and heartbeat.json, the sign of life of the start that runs. This module imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megamix.log_file import LogFile, cut_log, parsed
from megamix.run.run_folder import EVENTS, HEARTBEAT
from megamix.supervise.ledger import COMPILE, SAVING, START, TRAINED, VALIDATION, Ledger, boot_s
from megamix.supervise.processes import repeated
from megamix.supervise.status import read_status

Row = dict[str, Any]
BEAT_S = 1.0  # seconds from one heartbeat to the next
KILLED = "killed"  # the state at the end of a start that could not say how it ended
_DOING = {START: "starting", COMPILE: "compiling", TRAINED: "training", VALIDATION: "validating", SAVING: "saving"}
_BEAT_BYTES, _LONGEST = 1024, 500  # of a heartbeat, and of its reason: a full disk still takes it in place


class Reached(NamedTuple):
    """The place of a run."""

    step: int  # updates so far
    tokens: int  # of these


class Journal:
    """Writes the events of one start, on the first rank. Unless it is opened, it writes nothing. No method but `open`
    raises an OSError: rows that the disk does not take wait for it.

    A row holds `t`, seconds since 1970; `starts`, the number of this start of the run; `kind`; `at`, seconds since the
    start; `step` and `tokens` of all updates so far; `phase` and `seconds`, the ledger's.
    """

    def __init__(self, folder: Path, ledger: Ledger, reached: Callable[[], Reached]):
        """`reached`: returns the place of the run; any thread may call it."""
        self.starts = 0
        self.ledger, self._folder, self._reached = ledger, folder, reached
        self._file = LogFile(partial(Path, folder, EVENTS))
        self._rows = deque[bytes]()  # that no thread has given to the file yet
        self._writing, self._beating = threading.Lock(), threading.Lock()
        self._ended = False

    def open(self, **facts: Any) -> None:
        """Close the start before, if that could not do so itself, and begin a new one with `facts` about it. Raises:
        OSError.
        """
        cut_log(self._folder / EVENTS)
        rows = read_rows(self._folder)
        self.starts = (rows[-1]["starts"] if rows else 0) + 1
        if rows and rows[-1]["kind"] != "end":
            rows.append(closing_row(self._folder, rows))
            self._append(rows[-1])
        silent_s = time.time() - rows[-1]["t"] if rows else -1.0
        if silent_s >= 0:  # two starts of one process do not overlap
            self.ledger.begin_at(max(self.ledger.began_s, boot_s() - silent_s))
        row = self._row("start")
        self._append({**row, "t": row["t"] - row["at"], "at": 0.0, "host": socket.gethostname(), **facts})

    def tell(self, kind: str, **values: Any) -> None:
        """Write an event. Any thread may call it. The end is the last sign of life, too: a disk that is full then takes
        nothing else.
        """
        if not self.starts:
            return
        row = {**self._row(kind), **values}
        self._append(row)
        if kind == "end":
            self._ended = True
            self._beat({**row, "reason": row["reason"].partition("\n")[0][:_LONGEST]})

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Give a sign of life every second until the end of the block, then close the file."""

        def beat() -> None:
            self._beat(self._row("beat"))

        beat()
        try:
            with repeated(beat, BEAT_S, "heartbeat"):
                yield
        finally:
            with suppress(OSError), _held(self._writing):  # a save beside training may tell its end now
                self._file.close(waits=False)  # the last sign of life has the end

    def _beat(self, row: Row) -> None:
        text = json.dumps(row).ljust(_BEAT_BYTES - 1) + "\n"
        with suppress(OSError), _held(self._beating):
            if row["kind"] == "beat" and self._ended:
                return
            descriptor = os.open(self._folder / HEARTBEAT, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, text.encode(), 0)
            finally:
                os.close(descriptor)

    def _row(self, kind: str) -> Row:
        row = {"t": round(time.time(), 3), "starts": self.starts, "kind": kind}
        return row | self._reached()._asdict() | self.ledger.read()._asdict()

    def _append(self, row: Row) -> None:
        self._rows.append(json.dumps(row).encode() + b"\n")
        with suppress(OSError), _held(self._writing):
            while self._rows:
                self._file.append(self._rows.popleft())


@contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock during the block. Raises: TimeoutError if another thread hangs in the disk with it."""
    if not lock.acquire(timeout=1.0):
        raise TimeoutError
    try:
        yield
    finally:
        lock.release()


def read_rows(folder: Path) -> list[Row]:
    """Return the events of a run's folder; none if there is no file. Lines that no run has written whole are left out,
    and so are rows of a start that a later one has taken for dead. Raises: OSError.
    """
    rows = list[Row]()
    if (folder / EVENTS).is_file():
        for line in (folder / EVENTS).read_bytes().split(b"\n"):
            row = parsed(line)
            if row and (not rows or row["kind"] == "start" or row["starts"] == rows[-1]["starts"]):
                rows.append(row)
    return rows


def read_beat(folder: Path) -> Row:
    """Return the last sign of life in a run's folder; empty if there is none."""
    with suppress(OSError):
        return parsed((folder / HEARTBEAT).read_bytes().partition(b"\n")[0])
    return {}


def closing_row(folder: Path, rows: list[Row]) -> Row:
    """Return the row that ends the last start of `rows`, which could not write it: by its last sign of life, or by its
    status if another rank has written that, else as that of a killed one.
    """
    beat, number, status = read_beat(folder), rows[-1]["starts"], read_status(folder)
    last = beat if beat.get("starts") == number and beat["at"] >= rows[-1]["at"] else rows[-1]
    if last["kind"] == "end":
        return last
    if status.starts == number and status.state != "running":
        ended = {"state": status.state, "reason": status.reason, "exit_status": status.exit_status}
        silent_s = max(0.0, status.t - last["t"])
    else:
        doing = _DOING.get(last["phase"], "training")
        ended = {"state": KILLED, "reason": f"killed without a word while {doing}", "exit_status": None}
        silent_s = BEAT_S / 2 if last is beat else 0.0  # between two signs of life
    return {**last, "t": last["t"] + silent_s, "at": last["at"] + silent_s, "kind": "end", **ended}
