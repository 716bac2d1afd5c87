"""Files as they are uncompressed: gzip and Zstandard, by the end of the name."""

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any

from megamix.data import import_extra

COMPRESSED = (".gz", ".zst")
_ZST_BLOCK = 2**14  # compressed bytes read at a time; damage loses the whole block, also what comes before it


class DamagedFile(Exception):
    """An error of a file in which nothing more can be found, such as the beginning of its next record."""


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, DamagedFile)  # errors of reading a damaged file


def open_plain(path: str) -> IO[bytes]:
    """Open a file for its uncompressed bytes. Raises: ValueError if `zstandard` is needed and not installed. Reading
    may raise any of DAMAGE.
    """
    if path.endswith(".gz"):
        return gzip.open(path)  # type: ignore[return-value]  # it has the methods of a binary file
    if path.endswith(".zst"):
        zstandard = import_extra("zstandard", "data", what=f"{path}: ")
        return io.BufferedReader(_ZstFrames(path, zstandard), 2**20)
    return Path(path).open("rb")


class _ZstFrames(io.RawIOBase):
    """A stream of a file's Zstandard frames. zstandard's own reader does not notice that a file was cut short."""

    def __init__(self, path: str, zstandard: Any) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by close()
        self._zstandard = zstandard
        self._frame: Any = None  # the frame being decompressed
        self._compressed = b""  # bytes read from the file, not decompressed yet
        self._ready = memoryview(b"")  # decompressed bytes, not taken yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer)
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(_ZST_BLOCK)
            if not self._compressed:
                if self._frame is not None:
                    raise DamagedFile("the compressed file ended before the end of a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._zstandard.ZstdError as error:
                raise DamagedFile(str(error)) from error
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        taken = min(len(target), len(self._ready))
        target[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def close(self) -> None:
        self._file.close()
        super().close()
