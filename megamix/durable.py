"""Files that a power cut does not tear, and that are ours where others may write to the folder as well.

Whoever may write to a folder can put a link where a run will write: opened by name it would lead to any file of ours.
A FIFO would keep the run waiting for its other end. So a file that is written anew is made by us and by nobody else,
and one that goes on is looked at before it is used.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ASIDE = ".partial-"  # then something random
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}


class ForeignFileError(OSError):
    """A file that is not an ordinary one of this user's alone."""


def sync_file(handle: IO[Any]) -> None:
    """Push an open file's bytes to the disk; without it a rename can survive a power cut that the bytes did not."""
    handle.flush()
    os.fsync(handle.fileno())


def sync_directory(path: Path) -> None:
    """Push a directory's entries to the disk; without it a finished rename can be undone by a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path`, or of a link there, once the block has ended and its bytes are on the
    disk: `path` is whole or as it was. A process killed meanwhile leaves the file, for `remove_asides`.

    Raises: OSError naming a file.
    """
    aside = path.with_name(f"{path.name}{ASIDE}{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            yield file
            sync_file(file)
        aside.rename(path)
        sync_directory(path.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a failed write or sync does not say of what
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or as it was, and on the disk when this returns."""
    with written_aside(path) as file:
        file.write(text.encode())


def remove_asides(folder: Path, pattern: str) -> None:
    """Remove what killed processes left of writing files of that name. Nobody may be writing one."""
    for aside in folder.glob(f"{pattern}{ASIDE}*"):
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def create_anew(path: Path, mode: str = "xb") -> IO[Any]:
    """A new file in place of whatever has that name: a link is removed, never followed."""
    path.unlink(missing_ok=True)
    return path.open(mode, encoding=None if "b" in mode else "utf-8")


def foreign_kind(path: Path) -> str | None:
    """What keeps a file from being an ordinary one of ours alone; None where nothing does, or there is none."""
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
    """The descriptor of an ordinary file of ours alone; with O_CREAT made if it is missing, its mode by the umask.

    Raises: ForeignFileError naming file and fix; OSError.
    """
    assert not flags & os.O_TRUNC, "what is not ours must stay as it is"
    kind = foreign_kind(path)  # first: to open a device may already do something
    if kind is None:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        kind = _foreign_kind(os.fstat(descriptor))  # it may have changed in between
        if kind is None:
            return descriptor
        os.close(descriptor)
    raise ForeignFileError(f"{path} is {kind}: remove it, or put a copy of your own there")


def still_names(path: Path, descriptor: int) -> bool:
    """Tell whether a path, no link, leads to an open file: it may have been removed or replaced since."""
    opened = os.fstat(descriptor)
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def read_own(path: Path) -> bytes:
    """All of a file of ours. Raises: ForeignFileError, OSError."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()
