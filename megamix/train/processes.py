"""What the system knows of this host's processes. No torch here: the launcher looks before that is imported."""

from __future__ import annotations

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
    """The processes that it has started, and that are still there."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in pids if (found := process(child)) is not None and found.parent == pid]
