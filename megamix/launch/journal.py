"""The journal of a run, of all its starts: journal.jsonl in its folder. The first line is the sign of life of the start
that runs. It always has the same length and is replaced in place, so a full disk takes it, too, and a row that a kill
has cut cannot harm it. Events are appended behind it. This module imports no torch.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megamix.base.console import say
from megamix.base.durable import write_text
from megamix.base.log_file import LogFile, parsed
from megamix.base.processes import repeated
from megamix.launch.exit_status import EndedEarlyError
from megamix.launch.ledger import COMPILE, SAVING, START, TRAINED, VALIDATION, Ledger, boot_s

Row = dict[str, Any]
JOURNAL = "journal.jsonl"
_SIGN_BYTES = 4096  # of the first line: one block of a disk
_LONGEST = 500  # characters of an end's reason in a sign of life, which have room there in any script
BEAT_S = 1.0  # seconds from one sign of life to the next
KILLED = "killed"  # the state at the end of a start that could not say how it ended
_DOING = {START: "starting", COMPILE: "compiling", TRAINED: "training", VALIDATION: "validating", SAVING: "saving"}
_KEYS = ("t", "starts", "kind", "step", "tokens", "at", "phase", "seconds")  # of every row


class Reached(NamedTuple):
    """The place of a run."""

    step: int  # updates so far
    tokens: int  # of these


class Journal:
    """Writes the rows of one start. The first rank opens it. On another rank only an end is written: that of a run
    whose first rank is dead or silent. No method but `open` raises an OSError: rows that the disk does not take wait
    for it.

    A row holds `t`, seconds since 1970; `starts`, the number of this start of the run; `kind`; `at`, seconds since the
    start; `step` and `tokens` of all updates so far; `phase` and `seconds`, the ledger's.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        reached: Callable[[], Reached],
        ended: Callable[..., None] = lambda **_: None,
    ):
        """`reached`: returns the place of the run; any thread may call it. `ended`: called with `state`, `reason` and
        `exit_status` once the end is written.
        """
        self.starts = 0
        self.folder, self.ledger = folder, ledger
        self._reached, self._tell_ended = reached, ended
        self._file = LogFile(folder / JOURNAL, head=sign_line({}))
        self._rows = deque[Row]()  # that no thread has given to the file yet
        self._writing = threading.Lock()
        self._has_ended = False

    def open(self, **facts: Any) -> None:
        """Close the start before, if that could not do so itself, and begin a new one with `facts` about it. The file
        is whole or as it was. Raises: OSError.
        """
        rows = read_rows(self.folder)
        self.starts = (rows[-1]["starts"] if rows else 0) + 1
        if rows and rows[-1]["kind"] != "end":
            rows.append(closing_row(rows[-1]))
        silent_s = time.time() - rows[-1]["t"] if rows else -1.0
        if silent_s >= 0:  # two starts of one process do not overlap
            self.ledger.begin_at(max(self.ledger.began_s, boot_s() - silent_s))
        row = self._row("start")
        rows.append({**row, "t": row["t"] - row["at"], "at": 0.0, **_this_process(), **facts})
        lines = [f"{json.dumps(row)}\n" for row in rows if row["kind"] != "beat"]
        write_text(self.folder / JOURNAL, sign_line({}).decode() + "".join(lines))
        remove_rows_before(self.folder)

    def tell(self, kind: str, **values: Any) -> None:
        """Write an event. Any thread may call it. On another rank than the first it does nothing."""
        if self.starts:
            self._rows.append({**self._row(kind), **values})
            with suppress(OSError):
                self._write()

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended, as an event and as the last sign of life: a disk that is full takes only that. If it
        takes nothing, print it on the console. `error`: the exception that ended it; None if all updates are done.
        """
        end: Row = {"state": "finished", "reason": "", "exit_status": 0}
        if error is not None:
            if not isinstance(error, EndedEarlyError):
                notes = getattr(error, "__notes__", [])  # such as the watchdog's end reason
                error = EndedEarlyError("\n".join([*notes, f"{type(error).__name__}: {error}"]))
            end = {"state": error.state, "reason": str(error), "exit_status": error.exit_status}
        row = self._row("end") | end | _this_process()
        try:
            if not self.starts and (rows := read_rows(self.folder)):  # the first rank has begun this start
                row |= end_row(rows[-1], row["t"], step=max(rows[-1]["step"], row["step"]))
            self._rows.append(row)
            self._write(row | {"reason": end["reason"].partition("\n")[0][:_LONGEST]})
        except OSError as refused:
            say(
                f"megamix train: {self.folder / JOURNAL} NOT written: {refused}; the run ended as {end['state']} (exit "
                f"status {end['exit_status']}) after update {row['step']}: {end['reason'] or 'all is done'}",
                sys.stderr,
            )
        self._tell_ended(**end)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Give a sign of life every second until the end of the block, then close the file."""

        def beat() -> None:
            with suppress(OSError):
                self._write(self._row("beat"))

        beat()
        try:
            with repeated(beat, BEAT_S, "journal"):
                yield
        finally:
            with suppress(OSError), self._alone():
                self._file.close(waits=False)  # the last sign of life has the end

    def _row(self, kind: str) -> Row:
        row = {"t": round(time.time(), 3), "starts": self.starts, "kind": kind}
        return row | self._reached()._asdict() | self.ledger.read()

    def _write(self, sign: Row | None = None) -> None:
        """Append the rows that wait, and replace the sign of life unless that is the end. Raises: OSError."""
        with self._alone():
            while self._rows:
                self._file.append(json.dumps(self._rows.popleft()).encode() + b"\n")
            if sign is not None and not self._has_ended:
                self._has_ended = sign["kind"] == "end"
                with (self.folder / JOURNAL).open("r+b", buffering=0) as file:
                    file.write(sign_line(sign))
            if self._has_ended:
                self._file.sync()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from the file. Raises: TimeoutError if one hangs in the disk with it."""
        if not self._writing.acquire(timeout=1.0):
            raise TimeoutError("another thread waits for the disk")
        try:
            yield
        finally:
            self._writing.release()


def _this_process() -> Row:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's folder; none if there is no journal. If the last start has not said how it ended, its
    last row is its last sign of life.

    Left out are lines that no run has written whole, and what a start says after its end: a later start or another rank
    has taken it for dead. Raises: OSError.
    """
    path = folder / JOURNAL
    return _rows_in(path.read_bytes()) if path.is_file() else _rows_before(folder)


def began_s(folder: Path) -> float | None:
    """Return the time of a run's first start, in seconds since 1970, by which it differs from another run in the same
    folder; None before it. Raises: OSError.
    """
    rows = read_rows(folder)
    return float(rows[0]["t"]) if rows else None


def loads(folder: Path) -> list[tuple[int, int]]:
    """Return each start's number, and the update from which it went on. Raises: OSError."""
    return [(row["starts"], row["step"]) for row in read_rows(folder) if row["kind"] == "loaded"]


def _rows_in(journal: bytes) -> list[Row]:
    sign, *events = (row if row.keys() >= {*_KEYS} else {} for row in map(parsed, journal.split(b"\n")))
    rows = list[Row]()
    for row in filter(None, events):
        goes_on = bool(rows) and row["starts"] == rows[-1]["starts"]
        if not rows or row["kind"] == "start" or (goes_on and rows[-1]["kind"] != "end"):
            rows.append(row)
        elif goes_on and row["kind"] != "end":
            rows.insert(-1, row)  # of a save beside training that outlived the loop
    lives = bool(sign and rows) and rows[-1]["kind"] != "end" and sign["starts"] == rows[-1]["starts"]
    return [*rows, sign] if lives and sign["at"] >= rows[-1]["at"] else rows


def sign_line(row: Row) -> bytes:
    """Return the first line of a journal, with a sign of life or without one."""
    return json.dumps(row).encode().ljust(_SIGN_BYTES - 1) + b"\n"


def end_row(last: Row, t: float, **end: Any) -> Row:
    """Return the row that ends a start at `t`, seconds since 1970, by the last row that is known of it."""
    silent_s = max(0.0, t - last["t"])
    times = {"t": last["t"] + silent_s, "at": last["at"] + silent_s}
    return {name: last[name] for name in _KEYS} | times | {"kind": "end"} | end


def closing_row(last: Row) -> Row:
    """Return the end of a start that could not say how it ended, by its last row."""
    silent_s = BEAT_S / 2 if last["kind"] == "beat" else 0.0  # between two signs of life
    reason = f"killed without a word while {_DOING.get(last['phase'], 'training')}"
    return end_row(last, last["t"] + silent_s, state=KILLED, reason=reason, exit_status=None)


_BEFORE = ("heartbeat.json", "events.jsonl", "status.json")


# The reading of folders from before journal.jsonl goes at the first tag: these two functions with their calls.
def _rows_before(folder: Path) -> list[Row]:
    """Return the rows of a folder that has no journal, but the three files of which it is made now."""
    sign, events, status = (path.read_bytes() if path.is_file() else b"" for path in map(folder.joinpath, _BEFORE))
    rows = _rows_in(sign.partition(b"\n")[0] + b"\n" + events)
    end = parsed(status)
    # Another rank than the first wrote its end only there.
    if rows and rows[-1]["kind"] != "end" and end.get("starts") == rows[-1]["starts"] and end["state"] != "running":
        t = datetime.datetime.fromisoformat(end["time"]).timestamp()
        names = ("state", "reason", "exit_status", "host", "pid")
        rows.append(end_row(rows[-1], t, step=end["update"], **{name: end[name] for name in names}))
    return rows


def remove_rows_before(folder: Path) -> None:
    """Remove the files of which the journal now has the rows: they would say that the run has ended."""
    for name in _BEFORE:
        (folder / name).unlink(missing_ok=True)
