"""Files that survive a power cut whole."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ASIDE = ".partial-"  # followed by a random part
# Errors of a file system without flock, as Lustre mounted without it, or NFS without lockd.
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def existing_parent(folder: Path) -> Path:
    """Return the folder, or its nearest parent that is there."""
    return next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))


def unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, created with its missing parents; None if it can be written.

    A folder is created and removed on trial, because permission bits do not tell everything (root may not write to
    /proc).
    """
    existing = existing_parent(folder)
    try:
        aside = existing / aside_name("tried")
        aside.mkdir()
        aside.rmdir()
    except OSError as error:
        return f"{existing} takes no new folder ({error.strerror})"
    return None


def sync_file(handle: IO[Any]) -> None:
    """Push an open file's bytes to the disk. Without it a rename can survive a power cut that the bytes did not."""
    handle.flush()
    os.fsync(handle.fileno())


def advise(handle: IO[Any], start: int, size: int, advice: str) -> None:
    """Tell the kernel how bytes of an open file will be used: "WILLNEED", or "DONTNEED", which starts their write-back
    and drops them from memory. macOS takes no advice.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle.fileno(), start, size, getattr(os, f"POSIX_FADV_{advice}"))


def sync_directory(path: Path) -> None:
    """Push a directory's entries to the disk. Without it a power cut can undo a finished rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_name(name: str) -> str:
    """Return a new name for a file under construction, never the same twice, so that nothing of an earlier attempt is
    mixed in.
    """
    return f"{name}{ASIDE}{secrets.token_hex(4)}"


@contextmanager
def written_aside(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path`, or a link there, after the block, once its bytes are on the disk: `path` is
    whole or as it was. A process killed in the block leaves the file, for `remove_asides`.

    Without `sync` nothing waits for the disk, and a power cut may damage the file.
    Raises: OSError naming a file.
    """
    aside = path.with_name(aside_name(path.name))
    try:
        with aside.open("xb") as file:
            yield file
            if sync:
                sync_file(file)
        aside.rename(path)
        if sync:
            sync_directory(path.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a failed write or sync does not name its file
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file that is either whole or as it was, and on the disk when this returns."""
    with written_aside(path) as file:
        file.write(text.encode())


@contextmanager
def folder_aside(path: Path, inside: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` after the block: `path` is whole or missing.

    The body of the `with` statement must itself sync the files to the disk. `inside`: the folder's parent until then,
    if not that of `path`. A process killed in the block leaves the folder, for `remove_asides`.
    Raises: OSError, also if `path` is a folder that is not empty.
    """
    aside = (inside or path.parent) / aside_name(path.name)
    aside.mkdir()
    try:
        yield aside
        sync_directory(aside)
        aside.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_asides(folder: Path, pattern: str) -> None:
    """Remove the unfinished files of that name that killed processes have left. Nobody may be writing one."""
    for aside in folder.glob(f"{pattern}{ASIDE}*"):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def still_names(path: Path, descriptor: int) -> bool:
    """Return whether a path still leads to an open file. It may have been removed or replaced since."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def lock_file(descriptor: int, operation: int) -> bool:
    """Take a flock of an open file, which lasts until the file is closed, and return True; or return False if the file
    system has none. Raises: BlockingIOError if another process has it and `operation` is not to wait.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True
