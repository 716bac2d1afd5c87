"""Facts about this host's processes, from the system, and a thread that repeats its work. This module imports no torch,
as the launcher needs.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


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
    """The fields of /proc/PID/stat that are needed here; see proc(5)."""

    state: str  # a letter: Z and X are dead, even before the parent has noticed; T is stopped
    parent: int
    start: str  # ticks since boot


def process(pid: int) -> Process | None:
    """Return a process's fields; None if it no longer exists."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(after_name[0], int(after_name[1]), after_name[19])


def process_start(pid: int) -> str:
    """Return when a process started; "" if it is dead. The start tells a process from a later one with the same pid."""
    found = process(pid)
    return "" if found is None or found.state in "ZX" else found.start


def children_of(pid: int) -> list[int]:
    """Return the pids of the processes that `pid` has started and that still exist."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in pids if (found := process(child)) is not None and found.parent == pid]


class Siblings:
    """The other processes that this process's parent has started, as the system lists them: the ranks of one launcher.
    A rank may end only these, even if the ranks' store names another pid, because others can write to that store.

    Create this object when all ranks run.
    """

    def __init__(self) -> None:
        parent = os.getppid()
        found = {pid: process_start(pid) for pid in children_of(parent) if pid != os.getpid()}
        # If the launcher is dead, the parent is init or a subreaper, whose other children are no ranks.
        self._starts = found if parent == os.getppid() != 1 else {}

    def stopped(self) -> list[int]:
        """Return the pids of siblings that are stopped, by SIGSTOP or at a terminal."""
        return [pid for pid in self._starts if self._is_ours(pid) and (found := process(pid)) and found.state == "T"]

    def end(self, pid: int) -> None:
        """Kill a sibling, stopped or not; leave any other process alone."""
        if self._is_ours(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        """Return whether the pid is still the same sibling process, and belongs to this user."""
        try:
            same_user = Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
        except OSError:
            return False
        return pid in self._starts and same_user and process_start(pid) == self._starts[pid] != ""
