"""What the system knows of this host's processes. No torch here: the launcher looks before that is imported."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A line of /proc/PID/stat, as far as it is needed; see proc(5)."""

    state: str  # a letter: Z and X are dead, though the parent may not have noticed; T is stopped
    parent: int
    start: str  # ticks since boot


def process(pid: int) -> Process | None:
    """None if it is no more."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(after_name[0], int(after_name[1]), after_name[19])


def process_start(pid: int) -> str:
    """When a process started; "" if it is dead. Tells a reused pid apart."""
    found = process(pid)
    return "" if found is None or found.state in "ZX" else found.start


def children_of(pid: int) -> list[int]:
    """Return the processes that it has started, and that are still there."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in pids if (found := process(child)) is not None and found.parent == pid]


class Siblings:
    """What this process's parent has started beside it, as the system says: the ranks of one launcher. They alone may
    be ended from here, whatever pid the ranks' store holds, for others can write to that.

    Create it when all ranks run.
    """

    def __init__(self) -> None:
        parent = os.getppid()
        found = {pid: process_start(pid) for pid in children_of(parent) if pid != os.getpid()}
        # An orphan's parent is init, or what stands in for it: nothing that this brings up is a rank.
        self._starts = found if parent == os.getppid() != 1 else {}

    def stopped(self) -> list[int]:
        """Their pids: by SIGSTOP, or at a terminal."""
        return [pid for pid in self._starts if self._is_ours(pid) and (found := process(pid)) and found.state == "T"]

    def end(self, pid: int) -> None:
        """Kill a sibling, stopped or not; leave any other process alone."""
        if self._is_ours(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        """Whether it is still the process that it was at the start, of this user."""
        try:
            same_user = Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
        except OSError:
            return False
        return pid in self._starts and same_user and process_start(pid) == self._starts[pid] != ""
