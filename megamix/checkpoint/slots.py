"""Names and records of what runs keep in the shared memory of this node. This module imports no torch.

A run has a folder there. A slot in it is one rank's share of the state, a file as in a checkpoint; the record beside
the file, put there by a rename, makes it whole. What a process has written there outlives the process, not the node.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, cast

from megamix.base.durable import lock_file
from megamix.checkpoint.manifest import Manifest, Record

SHARED = Path(os.environ.get("MEGAMIX_SHM", "/dev/shm"))  # of this node, as every rank on it sees it
_RUN = "run.txt"  # the path of the run's folder; a rank that lives has a flock of this file
TENSORS, RECORD = ".safetensors", ".json"


def number_of_slots(*, async_save: bool) -> int:
    """Return how many slots a share has: two take turns, and a save beside training writes from one more."""
    return 3 if async_save else 2


class SlotRecord(Record):
    """Says what a slot holds."""

    began: float  # time of the run's first start, in seconds since 1970: another run in the same folder has another one
    start: int  # number of the start that wrote it
    slot: int = 0
    rank: int  # whose share it is
    twins: tuple[int, ...]  # all ranks that own this share, `rank` among them
    ranks: int  # number of the run's ranks
    size: int = 0  # of the file, in bytes
    total: int = 0  # sum of the 64-bit words of the file, modulo 2^64
    manifest: Manifest

    @property
    def version(self) -> tuple[int, int, int]:
        """Return what slots of one instant have in common: attempts, number of the start, number of ranks."""
        return cast(int, self.manifest.run.progress["attempts"]), self.start, self.ranks

    @property
    def name(self) -> str:
        return f"start_{self.start:05d}.rank_{self.rank:05d}.slot_{self.slot}"


def home_of(folder: Path) -> Path:
    """Return the folder in shared memory of the run in `folder`."""
    return SHARED / f"megamix-{os.getuid()}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}"


def records_in(home: Path) -> list[SlotRecord]:
    """Return the records of whole slots, the newest first."""
    found = list[SlotRecord]()
    for path in sorted(home.glob(f"*{RECORD}")) if _is_own(home) else ():
        with suppress(OSError, ValueError, LookupError):  # of another version
            record = SlotRecord.from_json(path.read_bytes())
            if record.version and path.stem == record.name:
                found.append(record)
    return sorted(found, key=lambda record: record.version, reverse=True)


def _is_own(home: Path) -> bool:
    """Return whether this user has made the folder: anybody can make one in shared memory first."""
    with suppress(OSError):
        return home.lstat().st_uid == os.getuid() and not home.is_symlink()
    return False


@contextmanager
def held_home(folder: Path) -> Iterator[Path]:
    """Make the run's folder in shared memory, and keep others from removing it until the end of the block."""
    home = home_of(folder)
    home.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(home):
        raise PermissionError(f"{home} is another user's, or a link; remove it, or name another folder in MEGAMIX_SHM")
    descriptor = os.open(home / _RUN, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(descriptor, fcntl.LOCK_SH)
        os.pwrite(descriptor, os.fsencode(folder.absolute()), 0)
        yield home
    finally:
        os.close(descriptor)


class Kept(NamedTuple):
    """Says what one run keeps in this node's shared memory."""

    home: Path
    folder: Path  # the run's
    size: int  # bytes
    update: int  # of its newest slot
    lives: bool


def all_kept() -> list[Kept]:
    """Return what this user's runs keep in this node's shared memory."""
    return [kept for home in SHARED.glob(f"megamix-{os.getuid()}-*") if (kept := kept_in(home)) is not None]


def kept_in(home: Path) -> Kept | None:
    """Return what a run keeps in its folder in shared memory; None if that is not there."""
    with suppress(OSError), open(home / _RUN, "r+b") as file:
        folder = Path(os.fsdecode(file.read()))
        lives = not _is_free(file.fileno())
        size = sum(path.stat().st_blocks * 512 for path in home.iterdir())
        update = max((record.manifest.applied_updates for record in records_in(home)), default=0)
        return Kept(home, folder, size, update, lives)
    return None


def _is_free(descriptor: int) -> bool:
    for _ in range(5):
        with suppress(BlockingIOError):
            lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)  # the other process may just be looking, too
    return False


def remove_home(home: Path) -> None:
    """Remove what a run keeps in this node's shared memory. Several ranks may call it at once."""
    shutil.rmtree(home, ignore_errors=True)


def remove_slot(home: Path, name: str) -> None:
    """Remove a slot: first its record, so that it never looks whole."""
    for suffix in (RECORD, TENSORS):
        (home / f"{name}{suffix}").unlink(missing_ok=True)
