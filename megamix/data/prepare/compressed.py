"""Files as they are uncompressed: gzip and Zstandard, by the end of the name."""

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any

from megamix.data import import_extra
from megamix.plugins import COMPRESSIONS

GZIP, ZSTD = COMPRESSIONS[:2], COMPRESSIONS[2:]  # endings
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZST_BLOCK = 2**14  # compressed bytes read at a time; damage loses the whole block, also what comes before it
_LARGEST_WINDOW = 2**31  # bytes; zstandard alone refuses more than 128 MiB, but `zstd --long=31` writes such files
_LARGEST_HEADER = 18  # bytes of the header of a Zstandard frame


class DamagedFile(Exception):
    """An error of a file in which nothing more can be found, such as the beginning of its next record."""


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, DamagedFile)  # errors of reading a damaged file


def is_named(path: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file has one of these endings, in small or capital letters."""
    return path.lower().endswith(endings)


def is_skippable(head: bytes) -> bool:
    """Return whether a Zstandard file goes on with a frame without data, as pzstd and seekable zstd write."""
    return head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5


def open_plain(path: str) -> IO[bytes]:
    """Open a file for its uncompressed bytes. Raises: ValueError if `zstandard` is needed and not installed. Reading
    may raise any of DAMAGE.
    """
    if is_named(path, GZIP):
        return gzip.open(path)  # type: ignore[return-value]  # it has the methods of a binary file
    if is_named(path, ZSTD):
        zstandard = import_extra("zstandard", "data", what=f"{path}: ")
        return io.BufferedReader(_ZstFrames(path, zstandard), 2**20)
    return Path(path).open("rb")


def window_bytes(path: str) -> int:
    """Return the bytes of its own past that a Zstandard file needs in memory while it is read, by the header of its
    first frame with data; 0 for other files.
    """
    if not is_named(path, ZSTD):
        return 0
    zstandard = import_extra("zstandard", "data", what=f"{path}: ")
    with Path(path).open("rb") as file:
        while is_skippable(head := file.read(_LARGEST_HEADER)):
            file.seek(8 + int.from_bytes(head[4:8], "little") - len(head), io.SEEK_CUR)
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0  # its reader will report the damage


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
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
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
