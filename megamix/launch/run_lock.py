"""The lock of a run's folder: one job at a time. A second job is refused; a dead job's lock is taken over.

`run.lock` names its holder: host, pid, time of the start. The holder's flock lasts until its process ends, in whatever
way. If flock reaches every host (a local disk, NFS, Lustre mounted with flock, GPFS), it decides alone. If flock does
not reach another host, or does not exist, the file's time decides: the holder touches the file every few seconds, and a
lock that a holder on another host has not touched for STALE_S is stale. One case is not covered: two jobs that start
within the same second on two hosts of a file system without flock between them.
"""

import datetime
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megamix.base.durable import lock_file, still_names
from megamix.base.processes import process, process_start, repeated
from megamix.config import ConfigError
from megamix.launch.exit_status import EXIT_STATUS

LOCK = "run.lock"
STALE_S = 60.0  # seconds without a touch after which another host's lock is stale


class HeldError(ConfigError):
    """The refusal of a folder that another job holds. The folder will be free some time, so a scheduler tries again."""

    exit_status = EXIT_STATUS["preempted"]


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], stale_s: float = STALE_S) -> Iterator[None]:
    """Hold `folder`, which must exist, until the end of the block. `say` gets one line if a stale lock is taken over.

    Raises: HeldError naming the holder, if it lives. If the holder is on another host, this takes up to `stale_s`.
    """
    path = folder / LOCK
    with _locked(path, stale_s, os.O_CREAT) as (descriptor, holder):
        if holder:
            say(f"{path}: taken over from pid {holder['pid']} on {holder['host']}, which left it behind")
        try:
            _sign(descriptor)
            with repeated(partial(_touch, descriptor), stale_s / 6, "run lock"):
                yield
        finally:
            with suppress(OSError):  # the error of a lost disk must not hide the run's own error
                path.unlink()  # before the flock ends, so that a process that waits with this file sees that it is gone


def refuse_held(folder: Path) -> None:
    """Refuse a folder that a job holds, without waiting and without writing.

    Raises: HeldError naming the holder; OSError.
    """
    with suppress(FileNotFoundError), _locked(folder / LOCK, stale_s=0.0):
        pass


@contextmanager
def _locked(path: Path, stale_s: float, create: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    descriptor = _open_locked(path, create)
    try:
        holder = dict[str, Any]()  # that the file names; none if it is new, or its writer died while writing
        with suppress(OSError, ValueError):
            holder = json.loads(path.read_bytes())
        if descriptor is None or (holder and _lives(holder, path, stale_s)):
            raise HeldError([_refusal(path.parent, holder)], "job")
        yield descriptor, holder
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_locked(path: Path, create: int) -> int | None:
    """Return the open lock file, with its flock if the file system has flock; None if another process has the flock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | create, 0o666)
        try:
            # A process that only looks takes a shared lock: when a job starts, many nodes look at once, and must not
            # take each other for the holder.
            has_lock = lock_file(descriptor, (fcntl.LOCK_EX if create else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if not has_lock or still_names(path, descriptor):
            return descriptor
        os.close(descriptor)  # the holder removed the file between our open and our flock


def _lives(holder: dict[str, Any], path: Path, stale_s: float) -> bool:
    """Return whether the holder lives although we got the flock, as may be on a file system without flock."""
    if holder["host"] == socket.gethostname():
        start = process_start(holder["pid"])
        return start != "" and start == holder["start"]
    # Only a change of the file's time counts, because this host's clock may differ from the file server's.
    touched = path.stat().st_mtime_ns
    end_s = time.monotonic() + stale_s
    while time.monotonic() < end_s:
        time.sleep(stale_s / 20)
        try:
            if path.stat().st_mtime_ns != touched:
                return True
        except FileNotFoundError:
            return True  # the holder has just removed the file, so it lived until now
    return False


def _refusal(folder: Path, holder: dict[str, Any]) -> str:
    who = "by a job that has not yet written its name"
    if holder:
        who = f"by pid {holder['pid']} on {holder['host']} since {holder['since']}"
        here = process(holder["pid"]) if holder["host"] == socket.gethostname() else None
        if here is not None and here.start == holder["start"] and here.is_stopped:
            who += ", which is stopped: kill -CONT continues it"
    return f"checkpoint.folder: {folder} is in use {who}; end that job first, or write another folder"


def _sign(descriptor: int) -> None:
    values = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{json.dumps(values)}\n".encode())
    os.fsync(descriptor)


def _touch(descriptor: int) -> None:
    """Touch the file: a sign of life for hosts that flock does not reach."""
    with suppress(OSError):  # a file server may be away for a while: the next touch tries again
        os.utime(descriptor)
