"""Ledger of one start of a run: how many seconds of wall time went into what. This module imports no torch."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

# A start spends its time on these. `down` lies between two starts, and `redone` is known only once a later start has
# gone back to an older checkpoint.
TRAINED, OVERFLOW, REDONE, START, COMPILE = "trained", "overflow", "redone", "start", "compile"
VALIDATION, SAVING, WAITING, STALLED, DOWN = "validation", "saving", "waiting", "stalled", "down"
BUCKETS = (TRAINED, OVERFLOW, REDONE, START, COMPILE, VALIDATION, SAVING, WAITING, STALLED, DOWN)

BEGAN = "MEGAMIX_BEGAN_S"  # names the variable in which a launcher tells when a start began, by `boot_s`
_KEPT = 0.9  # weight of the earlier attempts in their usual time


def boot_s() -> float:
    """Return the seconds since the machine has booted, those of a suspended laptop included."""
    # The other clock includes them on macOS, and has the same zero.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def age_s(pid: int) -> float:
    """Return the seconds since a process has started; 0 if it no longer exists."""
    with suppress(psutil.Error):
        return float(max(0.0, boot_s() - (psutil.Process(pid).create_time() - psutil.boot_time())))
    return 0.0


def stalled_s(took_s: float, usual_s: float) -> float:
    """Return the seconds that an attempt stood still: those beyond the usual ones, if it took more than three times as
    long and 5 s. After a validation or a save one outcome comes with the time of two attempts.
    """
    return took_s - usual_s if took_s > 3 * usual_s + 5.0 else 0.0


class Ledger:
    """Counts each second since `began_s` into one bucket. One thread counts; any thread may read. The loop enters
    COMPILE before its first attempt.

    `now_s`: returns the time in seconds, as `began_s` has it.
    """

    def __init__(self, began_s: float, now_s: Callable[[], float] = boot_s):
        self._now_s = now_s
        self.begin_at(began_s)
        self._phase = START
        self._seconds = defaultdict[str, float](float)
        self._usual_s: float | None = None  # of an attempt
        self._launches = 0
        self._lock = threading.Lock()

    def begin_at(self, began_s: float) -> None:
        """Begin anew at this time. Nothing may have been counted yet."""
        self.began_s = self._since_s = began_s

    def enter(self, phase: str) -> None:
        """Count the time so far to the phase that ends; what follows is counted to `phase`, a bucket."""
        with self._lock:
            self._seconds[self._phase] += self._taken_s()
            self._phase = phase

    def move(self, seconds: float, of: str, to: str) -> None:
        """Count seconds of one bucket to another one instead, as far as it has them."""
        with self._lock:
            moved_s = min(seconds, self._seconds[of])
            self._seconds[of] -= moved_s
            self._seconds[to] += moved_s

    def launched(self, took_s: float) -> None:
        """Take the host's time for an attempt, which may be under way still. What the first one takes longer than the
        second is compiling: of blocks, and of what is made at its first use.
        """
        self._launches += 1
        if self._launches == 1:
            self.enter(TRAINED)
        elif self._launches == 2:
            self.move(took_s, of=COMPILE, to=TRAINED)

    def settle(self, *, applied: bool, waited_s: float) -> None:
        """Count the time since the last call to an attempt. `waited_s`: seconds of all attempts so far in which the
        step waited for data.
        """
        with self._lock:
            took_s = self._taken_s()
            waiting_s = min(took_s, max(0.0, waited_s - self._seconds[WAITING]))
            step_s = took_s - waiting_s
            stood_s = 0.0 if self._usual_s is None else stalled_s(step_s, self._usual_s)
            step_s -= stood_s
            if self._launches > 1:
                self._usual_s = step_s if self._usual_s is None else _KEPT * self._usual_s + (1 - _KEPT) * step_s
            self._seconds[WAITING] += waiting_s
            self._seconds[STALLED] += stood_s
            self._seconds[TRAINED if applied else OVERFLOW] += step_s

    def read(self) -> dict[str, Any]:
        """Return what is counted so far, to milliseconds: `at`, seconds since the start; `seconds`, those by bucket;
        and the `phase` to which the others belong.
        """
        with self._lock:
            seconds = {bucket: round(value, 3) for bucket, value in self._seconds.items() if value >= 0.001}
            return {"at": round(self._now_s() - self.began_s, 3), "phase": self._phase, "seconds": seconds}

    def _taken_s(self) -> float:
        since_s, self._since_s = self._since_s, self._now_s()
        return self._since_s - since_s
