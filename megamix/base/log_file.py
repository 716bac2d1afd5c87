"""Log file that grows row by row. An error of its disk never ends the run."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json

HELD_BYTES = 16 << 20  # bytes of rows that wait for the disk; beyond them the oldest rows are lost
LAST_WAIT_S = 3.0  # seconds at the end of a run for a disk that does not take the last rows
_AGAIN_S = 0.1

log = logging.getLogger("megamix")


class LogFile:
    """File to which rows are appended. It holds whole rows at any time, in order. No method raises OSError.

    Rows that the disk does not take are held back, with one warning, and written once the disk takes them. A file that
    somebody removed is made anew.
    """

    def __init__(self, path: Path, head: bytes = b""):
        """Start a log. `head`: first bytes of a new file."""
        self.path, self._head = path, head
        self._held = deque[bytes]()
        self._in_trouble = False
        self._late = self._lost = 0  # number of late and of lost rows since the trouble began

    def append(self, row: bytes) -> None:
        self._held.append(row)
        self._late += self._in_trouble
        self._attempt(self._write)
        while sum(map(len, self._held)) > HELD_BYTES:
            self._held.popleft()
            self._lost += 1

    def sync(self) -> None:
        """Return once the disk has all rows that it takes."""
        self._attempt(partial(self._write, sync=True))

    def close(self, *, waits: bool = True) -> None:
        """Write the rest; if it `waits`, give a disk that does not take it a moment. Log how many rows are lost."""
        end_s = time.monotonic() + (LAST_WAIT_S if waits else 0.0)
        self.sync()
        while self._held and time.monotonic() < end_s:
            time.sleep(_AGAIN_S)
            self.sync()
        if self._held:
            log.warning("%s: the last %d rows could not be written and are lost", self.path, len(self._held))
            self._held.clear()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if not self._in_trouble:
                self._in_trouble, self._late = True, len(self._held)
                reason = error.strerror or error
                log.warning("%s NOT written: %s; the run goes on, and its rows are held back", self.path, reason)
            return
        if self._in_trouble:
            log.warning("%s is written again: %d rows were late, %d are lost", self.path, self._late, self._lost)
            self._in_trouble, self._late, self._lost = False, 0, 0

    def _write(self, *, sync: bool = False) -> None:
        if not self._held and not (sync and self.path.exists()):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            while self._held:
                whole = os.fstat(descriptor).st_size
                rest = memoryview(self._held[0] if whole else self._head + self._held[0])
                try:
                    while rest:  # write may take only a part
                        rest = rest[os.write(descriptor, rest) :]
                except BaseException:
                    os.ftruncate(descriptor, whole)  # readers of the log find whole rows meanwhile
                    raise
                self._held.popleft()
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def parsed(line: bytes) -> dict[str, Any]:
    """Return a row of a log; empty for a line that is none, such as one that a kill or a lost disk has cut."""
    with suppress(ValueError):
        row = from_json(line)  # of 100,000 lines, a second faster than json.loads
        if isinstance(row, dict):
            return row
    return {}


def cut_log(path: Path, is_later: Callable[[bytes], bool]) -> None:
    """Drop a row that a crash left unfinished at the end of a log, and the rows there for which `is_later` is true.
    Raises: OSError.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        kept = file.read()
        end = kept.rfind(b"\n") + 1
        while end and is_later(kept[kept.rfind(b"\n", 0, end - 1) + 1 : end]):
            end = kept.rfind(b"\n", 0, end - 1) + 1
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
