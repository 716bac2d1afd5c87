"""Progress of long work, on stderr: a line now and then. stdout may be data, so nothing of this is printed there."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

SILENT_S = 4.0  # seconds without a word before the first line about a piece of work
_AGAIN_S = 10.0  # least seconds between further lines
_TICK_S = 0.5


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
        self.speaks = os.environ.get("RANK", "0") == "0"
        self._next_s = math.inf  # time of the next line
        self._ended = threading.Event()
        self.begin("at work")

    def begin(self, what: str, total: float = 0.0, done: float = 0.0) -> None:
        """Say what the verb does from now on. `done`: part of `total` that is there before it begins."""
        now_s = time.monotonic()
        self.work = LongWork(what, now_s, total, done, done)
        self._next_s = min(self._next_s, now_s + SILENT_S)

    def advance(self, amount: float) -> None:
        """Count a part of the work as done."""
        self.work.done += amount

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Print nothing in the block, which speaks itself."""
        self._next_s = math.inf
        yield
        self._next_s = time.monotonic() + SILENT_S

    def __enter__(self) -> Self:
        if self.speaks:
            threading.Thread(target=self._tell, daemon=True, name="megamix progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _tell(self) -> None:
        while not self._ended.wait(_TICK_S):
            now_s = time.monotonic()
            if now_s < self._next_s:
                continue
            with suppress(OSError):  # nobody reads any more
                print(f"{self._who}: {self.work.told(now_s)}\n", end="", file=sys.stderr, flush=True)
            self._next_s = now_s + max(_AGAIN_S, (now_s - self.work.begun_s) / 20)
