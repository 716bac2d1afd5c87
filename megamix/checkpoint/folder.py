"""Names in a folder of checkpoints: a name says whether a checkpoint is complete, unfinished or damaged.

A rename changes that state in one instant. Only `Files` changes the disk. Each of its methods makes one call, so that a
test can let any call fail.
"""

import re
import shutil
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

from megamix.base import durable
from megamix.base.durable import ASIDE, folder_aside

CHECKPOINTS = "checkpoints"  # the folder's name in a run's folder
MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
DAMAGED = ".damaged-"  # in the name of a checkpoint that was set aside, for people to look at; it is never removed


def checkpoints(folder: Path, before: str | None = None) -> list[Path]:
    """Return the committed checkpoints, the newest first. `before`: a name; only older checkpoints are returned."""
    paths = [path for path in _folders(folder) if _COMPLETE.fullmatch(path.name)]
    return sorted(
        (path for path in paths if before is None or _number(path.name) < _number(before)),
        key=lambda path: _number(path.name), reverse=True,
    )  # fmt: skip


def unfinished(folder: Path) -> list[Path]:
    """Return the folders that are being written or removed. The next save removes those that a killed run has left."""
    return [path for path in _folders(folder) if ASIDE in path.name]


def set_aside(folder: Path) -> list[Path]:
    return [path for path in _folders(folder) if restored(path) != path]


def restored(path: Path) -> Path:
    """Return the path that a checkpoint had before it was set aside; the path itself if it was not."""
    return path.with_name(path.name.partition(DAMAGED)[0])


def _folders(folder: Path) -> list[Path]:
    """Return the folders within `folder`. A file is never taken for a checkpoint."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def folder_of(path: Path) -> Path:
    """Return a run's folder of checkpoints, or the path itself if it is no run. Raises: ValueError for no folder."""
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; give a run, a folder of checkpoints, or a checkpoint")
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints of a run or of a folder, the newest first. If the path is a checkpoint, return it alone.

    Raises: ValueError if there is none.
    """
    folder = folder_of(path)
    found = checkpoints(folder)
    # A run that has not saved yet is refused, and so are prepared texts, which have a manifest, too. A path that looks
    # like a checkpoint is returned, and checked later.
    looks_like_one = path.name.startswith("step_") or ((path / MANIFEST).exists() and not any(path.glob("*.idx")))
    if not found and (folder != path or not looks_like_one):
        raise ValueError(f"{folder} holds no checkpoint; give a run that has saved, or a checkpoint")
    return found or [path]


def applied_updates(checkpoint: Path) -> int:
    return _number(checkpoint.name)[0]


def name_for(folder: Path, applied_updates: int) -> str:
    """Return a name that no file or folder has, for the newest checkpoint after this update. There may be an earlier
    one, because two saves after the same update may differ in the batches to try again.
    """
    taken = [_number(path.name) for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    again = max((again for update, again in taken if update == applied_updates), default=-1) + 1
    return f"step_{applied_updates:08d}" + (f".{again}" if again else "")


def _number(name: str) -> tuple[int, int]:
    """Return the update, and the number of the save after this update. The newer of two checkpoints has the larger
    pair.
    """
    match = _COMPLETE.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def new_folder(output: Path, setting: str) -> AbstractContextManager[Path]:
    """Return a context with a new folder, which is renamed to `output` if the block ends without an error, and removed
    otherwise. `setting`: the name of the setting in errors.

    Raises: ValueError if `output` exists; OSError.
    """
    if output.exists() or output.is_symlink():
        raise ValueError(f"{setting} {output} is there already; give a new name")
    output.parent.mkdir(parents=True, exist_ok=True)
    return folder_aside(output)


class Files:
    """Writes checkpoints and removes them. Every method raises OSError."""

    begun_each = 4 << 20  # bytes of a file whose write-back starts together, while more is written
    written = 0  # bytes written so far: any thread may read here that a long save makes progress
    make_directory = staticmethod(Path.mkdir)
    rename = staticmethod(Path.rename)
    remove_file = staticmethod(Path.unlink)
    remove_directory = staticmethod(Path.rmdir)
    sync_file = staticmethod(durable.sync_file)
    sync_directory = staticmethod(durable.sync_directory)

    def create(self, path: Path) -> FileIO:
        return open(path, "xb", buffering=0)

    def write(self, file: FileIO, chunk: memoryview) -> None:
        while chunk:  # one write may take fewer bytes than it is given
            taken = file.write(chunk)
            chunk, self.written = chunk[taken:], self.written + taken

    def begin_sync(self, file: FileIO, start: int, size: int) -> None:
        """Start write-back of these bytes, so that `sync_file` takes less time."""
        durable.advise(file, start, size, "DONTNEED")

    def free_space(self, path: Path) -> int:
        """Return the bytes that an ordinary user may still write there."""
        return shutil.disk_usage(path).free

    def write_file(self, path: Path, chunks: Iterable[memoryview]) -> tuple[int, int]:
        """Write a new file, and return its size in bytes and the CRC32 of the chunks when it is on the disk."""
        size = begun = crc32 = 0
        try:
            with self.create(path) as file:
                for chunk in chunks:
                    # The checksum is that of the bytes in memory, while they are in the cache. If the disk stores other
                    # bytes, a later read finds that out.
                    size, crc32 = size + chunk.nbytes, zlib.crc32(chunk, crc32)
                    self.write(file, chunk)
                    if size - begun >= self.begun_each:
                        self.begin_sync(file, begun, size - begun)
                        begun = size
                self.sync_file(file)
        except OSError as error:
            error.filename = str(path)  # the error of a failed write or sync names no file
            raise
        return size, crc32

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with its content, or a file, if it exists. A link is removed, never followed."""
        if path.is_dir() and not path.is_symlink():
            for entry in sorted(path.iterdir()):
                self.remove_tree(entry)
            self.remove_directory(path)
        elif path.exists() or path.is_symlink():
            self.remove_file(path)
