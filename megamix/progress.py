"""Progress of long work, on stderr: a line that is rewritten on a terminal, a line now and then in a log.

A verb that uses it is not silent for longer than SILENT_S. stdout may be data, so nothing of this is printed there.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

SILENT_S = 4.0  # seconds without a word before the first line about a piece of work
_LOG_S = 10.0  # seconds between further lines in a log
_FRAME_S = 0.5  # seconds between rewrites on a terminal
_CLEAR = "\r\x1b[K"  # to the start of the terminal's line, and erase it


@dataclass(slots=True)
class LongWork:
    """A piece of work, in any unit. `total` 0: nobody knows how much there is."""

    what: str
    begun_s: float
    total: float = 0.0
    begun_at: float = 0.0  # part that was done before it began
    done: float = 0.0

    def told(self, now_s: float) -> str:
        """Return what it is, its share, its time and the time left, which follows from the speed so far."""
        elapsed_s = now_s - self.begun_s
        if not self.begun_at < self.done <= self.total:  # nothing is done yet, or there was more than anybody knew
            return f"{self.what}, {duration(elapsed_s)}"
        left_s = elapsed_s * (self.total - self.done) / (self.done - self.begun_at)
        share = 100 * self.done / self.total
        return f"{self.what}, {share:.0f} %, {duration(elapsed_s)}, about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """Return seconds as people say them: 0.2 s, 42 s, 3 min 20 s, 5 h 07 min, 2 d 03 h."""
    for unit, size, below, small in (("d", 86400, 3600, "h"), ("h", 3600, 60, "min"), ("min", 60, 1, "s")):
        if seconds >= max(size, 99.5):
            return f"{seconds // size:.0f} {unit} {seconds % size // below:02.0f} {small}"
    return f"{round(seconds, 1 if seconds < 10 else None):g} s"


class ProgressLine:
    """Tells the progress of a verb, `who`. It prints between `with` and its end, on the first rank only.

    The lines come from a thread, so that they also come while one long call is waited for.
    """

    def __init__(self, who: str = ""):
        self._who = who
        self.work = LongWork("at work", time.monotonic())
        self._spoke_s = time.monotonic()
        self._patience_s = SILENT_S
        self.speaks = os.environ.get("RANK", "0") == "0"
        self._shown = False  # whether the terminal's line holds our text
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True, name="megamix progress")

    def begin(self, what: str, total: float = 0.0, done: float = 0.0) -> None:
        """Say what the verb does from now on. `done`: part of `total` that is there before it begins."""
        self.work = LongWork(what, time.monotonic(), total, done, done)
        self._patience_s = SILENT_S

    def advance(self, amount: float) -> None:
        """Count a part of the work as done."""
        self.work.done += amount

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the terminal's line clear in the block, which prints."""
        with self._writing:
            self._write("")
            yield
            self._spoke_s = time.monotonic()
            self._patience_s = SILENT_S

    def __enter__(self) -> Self:
        if self.speaks:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        with self._writing:
            self._write("")

    def _tell(self) -> None:
        on_terminal = sys.stderr.isatty()
        while not self._ended.wait(_FRAME_S):
            now_s = time.monotonic()
            with self._writing:
                if self._ended.is_set() or now_s - self._spoke_s < self._patience_s:
                    continue
                if on_terminal:
                    self._write(f"{self._who}: {self.work.told(now_s)}")
                    continue
                with suppress(OSError, ValueError):  # nobody reads any more
                    print(f"{self._who}: {self.work.told(now_s)}", file=sys.stderr, flush=True)
                self._spoke_s, self._patience_s = now_s, _LOG_S

    def _write(self, text: str) -> None:
        """Put a text into the terminal's line, in place of the one before."""
        if not text and not self._shown:
            return
        self._shown = bool(text)
        width = shutil.get_terminal_size().columns - 1
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{_CLEAR}{text[:width]}")
            sys.stderr.flush()
