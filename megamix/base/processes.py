"""Facts about this host's processes, from the system, and a thread that repeats its work. This module imports no torch,
as the launcher needs.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil


@contextlib.contextmanager
def repeated(work: Callable[[], object], interval_s: float, name: str) -> Iterator[None]:
    """Let a thread of this name call `work` every `interval_s` seconds until the end of the block. The first call comes
    after as long; `work` must not raise.
    """
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Process(NamedTuple):
    """A process that is not dead."""

    start: str  # tells it from a later process with the same pid
    is_stopped: bool  # by SIGSTOP or at a terminal


def process(pid: int) -> Process | None:
    """Return a process; None if it is dead, even before its parent has noticed."""
    with contextlib.suppress(psutil.Error, ValueError):  # ValueError: a negative pid, which no process has
        found = psutil.Process(pid)
        if (state := found.status()) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            # Linux counts from boot, and psutil adds the time of boot, which moves when the clock is set. That is read
            # first, for psutil 5 keeps what was read last.
            boot_s = psutil.boot_time() if psutil.LINUX else 0.0
            return Process(f"{found.create_time() - boot_s:.2f}", state == psutil.STATUS_STOPPED)
    return None


def process_start(pid: int) -> str:
    """Return when a process started; "" if it is dead. The start tells a process from a later one with the same pid."""
    found = process(pid)
    return "" if found is None else found.start


def children_of(pid: int) -> list[int]:
    """Return the pids of the processes that `pid` has started and that still exist."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
