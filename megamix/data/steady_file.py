"""Files that must not change while a run reads them. A change raises an error with the file's name.

Mapped files are not used. If somebody truncates a mapped file, SIGBUS ends the process without a message; if the file
has grown again since, it reads as zeros. So every read is a system call, followed by a check of the file's size and
time of last write.
"""

from __future__ import annotations

import hashlib
import os
import platform
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22  # bytes hashed at once
_PAGE = 4096  # bytes read at once for single items


class DataError(ValueError):
    """An error of data that are damaged, have another vocabulary, or were written to while they were read."""


class SteadyFile:
    """A file that is open for reading, on any thread. Replacing it by a rename does no harm: the open file stays."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        opened = os.fstat(self._descriptor)
        self.size = opened.st_size  # bytes
        self._written_ns = opened.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1. Raises: as `read_each`."""
        return self.read_each([start], [stop])[0]

    def read_each(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Return the bytes of each stretch, as they were when the file was opened.

        Raises: DataError if the file has been written to since; OSError, with the file's name, if it cannot be read.
        """
        try:
            found = [self._read(start, stop) for start, stop in zip(starts, stops, strict=True)]
            now = os.fstat(self._descriptor)  # after the reads, so a write before any of them shows
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
        if now.st_size != self.size:
            raise self._changed(f"it had {self.size} bytes and has {now.st_size}")
        if now.st_mtime_ns != self._written_ns:
            raise self._changed(f"it still has {self.size} bytes, but was written to since")
        for content, start, stop in zip(found, starts, stops, strict=True):
            if len(content) < stop - start:
                raise self._changed(f"it has {self.size} bytes, but no more than {start + len(content)} come")
        return found

    def _read(self, start: int, stop: int) -> bytes:
        content = os.pread(self._descriptor, stop - start, start)
        while len(content) < stop - start:  # one call may return fewer bytes than there are
            more = os.pread(self._descriptor, stop - start - len(content), start + len(content))
            if not more:
                break
            content += more
        return content

    def _changed(self, how: str) -> DataError:
        return DataError(f"{self.path} was changed while it was read: {how}; write or copy it again, and start again")


class FileArray:
    """A one-dimensional array in a file, read at each use. It takes an index, slice or array, as numpy's arrays do."""

    def __init__(self, file: SteadyFile, dtype: np.dtype[np.generic], offset: int, length: int):
        """Keep the array's place in the file. `offset`: byte of the first item. `length`: number of items."""
        self.dtype = dtype
        self._file, self._offset, self._length = file, offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | np.integer | slice | NDArray[np.integer]) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return self._gathered(np.arange(start, stop, step))
            return self.stretches([start], [max(start, stop)])[0]
        if isinstance(index, np.ndarray):
            return self._gathered(index)
        place = range(self._length)[int(index)]
        return self.stretches([place], [place + 1])[0][0]

    def stretches(self, starts: Sequence[int], stops: Sequence[int]) -> list[NDArray[Any]]:
        """Return `self[start:stop]` of each pair, all within the array, by one `read_each`."""
        offset, size = self._offset, self.dtype.itemsize
        found = self._file.read_each([offset + n * size for n in starts], [offset + n * size for n in stops])
        return [np.frombuffer(content, self.dtype) for content in found]

    def _gathered(self, places: NDArray[np.integer]) -> NDArray[Any]:
        """Return the items at `places`, each from 0 to the length - 1. Shapes: as `places`."""
        room = _PAGE // self.dtype.itemsize
        numbers, page = np.unique(places.ravel() // room, return_inverse=True)
        starts = (numbers * room).tolist()
        stops = [min(start + room, self._length) for start in starts]
        pages = np.empty((len(numbers), room), self.dtype)
        for row, content in enumerate(self.stretches(starts, stops)):
            pages[row, : len(content)] = content
        found: NDArray[Any] = pages[page, places.ravel() % room]
        return found.reshape(places.shape)


def file_fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    add_file(digest, path)
    return digest.hexdigest()


def file_identity(path: Path) -> list[int]:
    """Return what identifies a file on a running system, and its state: device, inode, size and time of last write."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def machine_identity() -> str:
    """Return a name of the running system. Containers of one machine share it, as they share `file_identity`."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()


def add_file(digest: hashlib._Hash, path: Path) -> None:
    file = SteadyFile(path)
    for start in range(0, file.size, _CHUNK):
        digest.update(file.read(start, min(start + _CHUNK, file.size)))
