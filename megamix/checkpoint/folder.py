"""What lies in a folder of checkpoints: the names tell it, and a rename changes it at once.

`Files` has the only calls that change the disk, each a method of its own, so that a test can let any of them fail.
"""

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

from megamix import durable
from megamix.durable import ASIDE, folder_aside

CHECKPOINTS = "checkpoints"  # the folder's name in a run's folder
MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_DAMAGED = ".damaged-"  # set aside; for people to look at, never removed


def checkpoints(folder: Path, before: str | None = None) -> list[Path]:
    """Return those that were committed, the newest first; of them only those before the one of that name, if it is
    given.
    """
    paths = [path for path in _folders(folder) if _COMPLETE.fullmatch(path.name)]
    return sorted(
        (path for path in paths if before is None or _number(path.name) < _number(before)),
        key=lambda path: _number(path.name), reverse=True,
    )  # fmt: skip


def unfinished(folder: Path) -> list[Path]:
    """Return those that are being written or removed; the next save removes what is left of them."""
    return [path for path in _folders(folder) if ASIDE in path.name]


def set_aside(folder: Path) -> list[Path]:
    """Return those that were found damaged."""
    return [path for path in _folders(folder) if restored(path) != path]


def restored(path: Path) -> Path:
    """Return the path that one had before it was set aside; any other's own."""
    return path.with_name(path.name.partition(_DAMAGED)[0])


def _folders(folder: Path) -> list[Path]:
    """What may be a checkpoint: a file of such a name is somebody else's, and stays."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def folder_of(path: Path) -> Path:
    """Return where a run, or the path itself, has its checkpoints. Raises: ValueError if it is no folder."""
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; give a run, a folder of checkpoints, or a checkpoint")
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def checkpoints_at(path: Path) -> list[Path]:
    """Return those of a run or folder, the newest first; or the path itself. Raises: ValueError if there is none."""
    folder = folder_of(path)
    found = checkpoints(folder)
    # A run that has not saved yet is not damaged; what is named as a checkpoint is.
    if not found and (folder != path or not (path.name.startswith("step_") or (path / MANIFEST).exists())):
        raise ValueError(f"{folder} holds no checkpoint; give a run that has saved, or a checkpoint")
    return found or [path]


def applied_updates(checkpoint: Path) -> int:
    """Return the update after which it was saved, by its name."""
    return _number(checkpoint.name)[0]


def name_for(folder: Path, applied_updates: int) -> str:
    """Return a name behind all others of the same update, whatever bears them: two saves after it may differ, in what
    is to be tried again.
    """
    taken = [_number(path.name) for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    again = max((again for update, again in taken if update == applied_updates), default=-1) + 1
    return f"step_{applied_updates:08d}" + (f".{again}" if again else "")


def _number(name: str) -> tuple[int, int]:
    """The update, and which save after it. The larger, the newer."""
    match = _COMPLETE.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def damaged_name(name: str) -> str:
    return name + _DAMAGED + secrets.token_hex(4)


def new_folder(output: Path, setting: str) -> AbstractContextManager[Path]:
    """Give a folder that becomes `output`, the value of `setting`, whole, once the block has ended; or nothing does.

    Raises: ValueError if there is something of that name; OSError.
    """
    if output.exists() or output.is_symlink():
        raise ValueError(f"{setting} {output} is there already; give a new name")
    output.parent.mkdir(parents=True, exist_ok=True)
    return folder_aside(output)


class Files:
    """Writes checkpoints and removes them. Every method raises OSError."""

    begun_each = 4 << 20  # bytes of a file that are handed to the disk together while more is written
    written = 0  # bytes that the disk has taken so far: shows any thread that a long save is getting on
    make_directory = staticmethod(Path.mkdir)
    rename = staticmethod(Path.rename)
    remove_file = staticmethod(Path.unlink)
    remove_directory = staticmethod(Path.rmdir)
    sync_file = staticmethod(durable.sync_file)
    sync_directory = staticmethod(durable.sync_directory)

    def create(self, path: Path) -> FileIO:
        return open(path, "xb", buffering=0)

    def write(self, file: FileIO, chunk: memoryview) -> None:
        while chunk:  # the disk may take less than it is given
            taken = file.write(chunk)
            chunk, self.written = chunk[taken:], self.written + taken

    def begin_sync(self, file: FileIO, start: int, size: int) -> None:
        """Let the disk begin with these bytes and return, so that less is left to wait for in `sync_file`. What it has
        written need not stay in the kernel's memory, says the advice; that it writes at once is what it is given for.
        """
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)

    def free_space(self, path: Path) -> int:
        """Return the bytes that an ordinary user may still write there."""
        return shutil.disk_usage(path).free

    def write_file(self, path: Path, chunks: Iterable[memoryview]) -> tuple[int, int]:
        """Write a new file that is on the disk when this returns; its bytes, and the CRC32 of what was handed over."""
        size = begun = crc32 = 0
        try:
            with self.create(path) as file:
                for chunk in chunks:
                    # While the bytes are in the cache, and of what was meant to be written: what the disk makes of it
                    # is found by reading.
                    size, crc32 = size + chunk.nbytes, zlib.crc32(chunk, crc32)
                    self.write(file, chunk)
                    if size - begun >= self.begun_each:
                        self.begin_sync(file, begun, size - begun)
                        begun = size
                self.sync_file(file)
        except OSError as error:
            error.filename = str(path)  # a failed write or sync does not say of what
            raise
        return size, crc32

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it, or a file, if it is there. A link is removed, never followed."""
        if path.is_dir() and not path.is_symlink():
            for entry in sorted(path.iterdir()):
                self.remove_tree(entry)
            self.remove_directory(path)
        elif path.exists() or path.is_symlink():
            self.remove_file(path)
