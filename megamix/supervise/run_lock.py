"""One job in a run folder: a second one that starts there is refused, and what a dead one left is taken over.

`run.lock` names its holder (host, pid, since when) and is held by flock until the process ends, however it ends. That
decides alone where flock reaches every host: a local disk, NFS, Lustre mounted with flock, GPFS. Where it does not
reach another host, or does not exist, the file decides: its holder touches it every few seconds, and a file that a
holder on another host has left alone for STALE_S is stale. What is not covered: two jobs that start within the same
second on two hosts of a file system without flock between them.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megamix.config import ConfigError
from megamix.durable import open_own, read_own, still_names, sync_file
from megamix.supervise.processes import process, process_start

LOCK = "run.lock"
STALE_S = 60.0  # without a touch, before a lock of another host counts as left behind
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # this file system has none


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], stale_s: float = STALE_S) -> Iterator[None]:
    """Hold `folder`, which exists, until the end of the block. `say` gets one line if a stale lock is taken over.

    Raises: ConfigError naming the holder, if one lives. With a holder on another host that takes up to `stale_s`.
    """
    path = folder / LOCK
    with _locked(path, stale_s, os.O_CREAT) as (descriptor, holder):
        if holder:
            say(f"{path}: taken over from pid {holder['pid']} on {holder['host']}, which left it behind")
        try:
            _sign(descriptor)
            with _touched(descriptor, stale_s / 6):
                yield
        finally:
            with suppress(OSError):  # a disk that has gone says nothing of how the run ended
                path.unlink()  # while it is still locked: whoever opened this file will see that it is gone


def refuse_held(folder: Path) -> None:
    """Refuse a folder that a job holds, by what is known at once of its holder; write nothing.

    Raises: ConfigError naming the holder; OSError.
    """
    with suppress(FileNotFoundError), _locked(folder / LOCK, stale_s=0.0):
        pass


@contextmanager
def _locked(path: Path, stale_s: float, create: int = 0) -> Iterator[tuple[int, dict[str, str]]]:
    descriptor = _open_locked(path, create)
    try:
        holder = _holder(path)
        if descriptor is None or (holder and _lives(holder, path, stale_s)):
            raise ConfigError([_refusal(path.parent, holder)], "job")
        yield descriptor, holder
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_locked(path: Path, create: int) -> int | None:
    """The lock's file, open and with its flock where there is such a thing; None if another process has that."""
    while True:
        descriptor = open_own(path, os.O_RDWR | create)
        try:
            # Who only looks shares it: starts of many nodes look at once, and must not take each other for a job.
            fcntl.flock(descriptor, (fcntl.LOCK_EX if create else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return descriptor
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        if still_names(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder removed it between our open and our flock


def _holder(path: Path) -> dict[str, str]:
    """Who wrote the file; empty for a new one, or one whose writer died while writing."""
    try:
        holder = json.loads(read_own(path))
        return {key: str(holder[key]) for key in ("host", "start", "since")} | {"pid": str(int(holder["pid"]))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _lives(holder: dict[str, str], path: Path, stale_s: float) -> bool:
    """Whether a holder lives although its flock, if there is such a thing, does not keep us out."""
    if holder["host"] == socket.gethostname():
        return process_start(int(holder["pid"])) == holder["start"] != ""
    # Watched instead of compared with this host's time, which may differ from the file server's.
    touched = path.stat().st_mtime_ns
    end_s = time.monotonic() + stale_s
    while time.monotonic() < end_s:
        time.sleep(stale_s / 20)
        try:
            if path.stat().st_mtime_ns != touched:
                return True
        except FileNotFoundError:
            return True  # it lived until now
    return False


def _refusal(folder: Path, holder: dict[str, str]) -> str:
    who = "by a job that has not yet written its name"
    if holder:
        who = f"by pid {holder['pid']} on {holder['host']} since {holder['since']}"
        here = process(int(holder["pid"])) if holder["host"] == socket.gethostname() else None
        if here is not None and (here.start, here.state) == (holder["start"], "T"):
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
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
        sync_file(file)


@contextmanager
def _touched(descriptor: int, interval_s: float) -> Iterator[None]:
    """Touch the file again and again: a sign of life for hosts that flock does not reach."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(interval_s):
            with suppress(OSError):  # a file server that is away for a while is no reason to stop touching
                os.utime(descriptor)

    thread = threading.Thread(target=touch, name="run lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
