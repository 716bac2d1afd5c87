"""Files that must not change while a run reads them. A change raises an error with the file's name.

Mapped files are not used. If somebody truncates a mapped file, SIGBUS ends the process without a message; if the file
has grown again since, it reads as zeros. So every read is a system call, followed by a check of the file's size and
time of last write.
"""

from __future__ import annotations

import hashlib
import os
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
        self._descriptor = os.open(path, os.O_RDONLY)
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
            found = [self._read(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
            now = os.fstat(self._descriptor)  # after the reads, so a write before any of them shows
        except OSError as error:
            error.filename = str(self.path)
            raise
        is_short = sum(map(len, found)) < sum(stops) - sum(starts)
        if is_short or (now.st_size, now.st_mtime_ns) != (self.size, self._written_ns):
            how = "fewer come than are asked for" if is_short else "it was written to since"
            raise DataError(
                f"{self.path} was changed while it was read: it had {self.size} bytes and has {now.st_size}, {how}; "
                "write or copy it again, and start again"
            )
        return found

    def _read(self, start: int, size: int) -> bytes:
        content = b""
        # One call may return fewer bytes than there are.
        while len(content) < size and (more := os.pread(self._descriptor, size - len(content), start + len(content))):
            content += more
        return content


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
            assert step == 1, index
            return self.stretches([start], [max(start, stop)])[0]
        places = index if isinstance(index, np.ndarray) else np.asarray(range(self._length)[index])
        room = _PAGE // self.dtype.itemsize
        numbers, page = np.unique(places // room, return_inverse=True)
        starts = numbers * room
        pages = np.empty((len(numbers), room), self.dtype)
        stretches = self.stretches(starts.tolist(), np.minimum(starts + room, self._length).tolist())
        for row, content in enumerate(stretches):
            pages[row, : len(content)] = content
        return pages[page.reshape(places.shape), places % room]

    def stretches(self, starts: Sequence[int], stops: Sequence[int]) -> list[NDArray[Any]]:
        """Return `self[start:stop]` of each pair, all within the array, by one `read_each`."""
        offset, size = self._offset, self.dtype.itemsize
        found = self._file.read_each([offset + n * size for n in starts], [offset + n * size for n in stops])
        return [np.frombuffer(content, self.dtype) for content in found]


def file_fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    add_file(digest, path)
    return digest.hexdigest()


def file_identity(path: Path) -> list[int]:
    """Return what identifies a file on a running system, and its state: device, inode, size and time of last write."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def add_file(digest: hashlib._Hash, path: Path) -> None:
    file = SteadyFile(path)
    for start in range(0, file.size, _CHUNK):
        digest.update(file.read(start, min(start + _CHUNK, file.size)))
