"""Zstandard as a file of bytes that tells a file cut short from one that ends."""

import io
from pathlib import Path
from typing import IO, Any

_BLOCK = 2**14  # compressed bytes; where one is damaged, what it held before that place is lost too


class DamagedZst(Exception):
    """The compressed bytes end too early or are damaged."""


def open_zst(path: str) -> IO[bytes]:
    """Raises: ValueError if `zstandard` is not installed. Reading raises DamagedZst."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{path}: the Python package 'zstandard' is not installed; run: pip install 'megamix[data]'"
        ) from error
    return io.BufferedReader(_Frames(path, zstandard), 2**20)


class _Frames(io.RawIOBase):
    """Frames one after the other. zstandard's own stream reader takes a file cut short for one that ends there."""

    def __init__(self, path: str, zstandard: Any) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by close()
        self._zstandard = zstandard
        self._frame: Any = None  # being decompressed
        self._compressed = b""  # read from the file, not used yet
        self._ready = memoryview(b"")  # decompressed, not taken yet

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer)
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(_BLOCK)
            if not self._compressed:
                if self._frame is not None:
                    raise DamagedZst("the compressed file ended before the end of a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._zstandard.ZstdError as error:
                raise DamagedZst(str(error)) from error
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
