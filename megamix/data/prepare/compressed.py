"""Files as they are uncompressed: gzip and Zstandard, by the end of the name."""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megamix.data import import_extra
from megamix.plugins import COMPRESSIONS

GZIP, ZSTD = COMPRESSIONS[:2], COMPRESSIONS[2:]  # endings
_ZST_BLOCK = 2**14  # compressed bytes read at a time; damage loses the whole block, also what comes before it
_LARGEST_WINDOW = 2**31  # bytes; zstandard alone refuses more than 128 MiB, but `zstd --long=31` writes such files
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # begins a frame without data, as pzstd writes
_LARGEST_HEADER = 18  # bytes of the header of a Zstandard frame


class DamagedFile(Exception):
    """An error of a file in which nothing more can be found, such as the beginning of its next record."""


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, DamagedFile)  # errors of reading a damaged file


def is_named(path: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file has one of these endings, in small or capital letters."""
    return path.lower().endswith(endings)


def open_plain(path: str) -> IO[bytes]:
    """Open a file for its uncompressed bytes. Raises: ValueError if `zstandard` is needed and not installed. Reading
    may raise any of DAMAGE.
    """
    if is_named(path, GZIP):
        return gzip.open(path)  # type: ignore[return-value]  # it has the methods of a binary file
    if is_named(path, ZSTD):
        zstandard = import_extra("zstandard", "data", what=f"{path}: ")
        return io.BufferedReader(_Stream(_zst_blocks(path, zstandard)), 2**20)
    return Path(path).open("rb")


def window_bytes(path: str) -> int:
    """Return the bytes of its own past that a Zstandard file needs in memory while it is read, by the header of its
    first frame with data; 0 for other files.
    """
    if not is_named(path, ZSTD):
        return 0
    zstandard = import_extra("zstandard", "data", what=f"{path}: ")
    with Path(path).open("rb") as file:
        while _SKIPPABLE.match(head := file.read(_LARGEST_HEADER)):
            file.seek(8 + int.from_bytes(head[4:8], "little") - len(head), io.SEEK_CUR)
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0  # its reader will report the damage


def _zst_blocks(path: str, zstandard: Any) -> Iterator[bytes]:
    """Yield what a file's Zstandard frames hold. zstandard's own reader does not notice that a file was cut short."""
    frame = None  # the one being decompressed
    with Path(path).open("rb") as file:
        while block := file.read(_ZST_BLOCK):
            while block:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise DamagedFile(str(error)) from error
                block = frame.unused_data
                frame = None if frame.eof else frame
    if frame:
        raise DamagedFile("the compressed file ended before the end of a frame")


class _Stream(io.RawIOBase):
    """Blocks as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._ready = memoryview(b"")  # bytes of a block, not taken yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._ready = self._ready or memoryview(next(filter(None, self._blocks), b""))
        taken = min(len(buffer), len(self._ready))
        buffer[:taken], self._ready = self._ready[:taken], self._ready[taken:]
        return taken
