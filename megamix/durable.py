"""Files that survive a power cut whole, and that only this user owns even in a folder to which others may write.

Anyone who may write to a folder can put a link where a run will write; opening the name would open any file of this
user. A FIFO would keep the run waiting for its other end. So a new file is created by us and nobody else, and an
existing file is checked before it is used.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ASIDE = ".partial-"  # followed by a random part
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}


class ForeignFileError(OSError):
    """A file that is not an ordinary file of this user alone."""


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
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def create_anew(path: Path, mode: str = "xb") -> IO[Any]:
    """Create a new file in place of anything that has that name: a link is removed, never followed."""
    path.unlink(missing_ok=True)
    return path.open(mode, encoding=None if "b" in mode else "utf-8")


def foreign_kind(path: Path) -> str | None:
    """Return why a file is not an ordinary file of this user alone; None if it is one, or is missing."""
    try:
        return _foreign_kind(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _foreign_kind(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return _KINDS.get(stat.S_IFMT(status.st_mode), "no ordinary file")
    if status.st_uid != os.geteuid():
        return f"a file of another user (uid {status.st_uid})"
    return "a file with a second name (a hard link)" if status.st_nlink > 1 else None


def open_own(path: Path, flags: int) -> int:
    """Return the descriptor of an ordinary file of this user alone. O_CREAT creates a missing file, with a mode by the
    umask.

    Raises: ForeignFileError naming file and fix; OSError.
    """
    assert not flags & os.O_TRUNC, "a file of somebody else must stay as it is"
    kind = foreign_kind(path)  # checked before opening: opening a device may already have an effect
    if kind is None:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        kind = _foreign_kind(os.fstat(descriptor))  # checked again: it may have changed in between
        if kind is None:
            return descriptor
        os.close(descriptor)
    raise ForeignFileError(f"{path} is {kind}: remove it, or put a copy of your own there")


def still_names(path: Path, descriptor: int) -> bool:
    """Return whether a path, which is no link, still leads to an open file. The path may have been removed or replaced
    since.
    """
    opened = os.fstat(descriptor)
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def read_own(path: Path) -> bytes:
    """Return the whole content of an ordinary file of this user alone. Raises: ForeignFileError, OSError."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()
