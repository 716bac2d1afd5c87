"""What readers of files give: documents, and records that are none, each with its place in the file. And the readers of
text: a JSON object a line, as it is or compressed by gzip or Zstandard (only what is not compressed can be cut); and a
file of a kind that no reader knows, which is one document.
"""

import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from megamix.data import import_extra

# A record is held in memory several times over while it is encoded, its token ids as Python numbers among them.
LONGEST_DOCUMENT = 2**26  # bytes
_BLOCK = 2**22


class Document(NamedTuple):
    number: int  # line or row, from 1; 0: the file itself
    text: str


class BadRecord(NamedTuple):
    number: int
    reason: str


Records: TypeAlias = Iterator[Document | BadRecord]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a file, in the unit of its reader: bytes, row groups or batches."""

    start: int
    stop: int
    num_records_before: int
    num_bytes: int  # about how much work it is


class Blocks:
    """A file's bytes in blocks, hashed as they go by, so that a cutter that looks at them reads nothing twice.

    Each block lies where the one before it lay.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytearray]:
        block = bytearray(_BLOCK)
        while size := self._file.readinto(block):
            del block[size:]
            self._digest.update(block)
            yield block

    def sha256(self) -> str:
        """Return the hash of the whole file, in hexadecimal; the file is at its end then, and closed."""
        with self._file:
            for _ in self:
                pass
        return self._digest.hexdigest()


def checked(number: int, value: object, name: str) -> Document | BadRecord:
    """Return the document, if the value is text that UTF-8 can hold, not too long; `name`: what the user calls it."""
    if not isinstance(value, str):
        return BadRecord(number, f"{name} is {_TYPES.get(type(value), type(value).__name__)}, not a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return BadRecord(number, f"{name} holds half a surrogate pair at character {error.start}")
    return too_long(number, len(value)) or Document(number, value)


def too_long(number: int, size: int) -> BadRecord | None:
    if size <= LONGEST_DOCUMENT:
        return None
    return BadRecord(number, f"longer than {LONGEST_DOCUMENT} bytes, the most of one document; cut it into several")


def decoded(number: int, content: bytes) -> Document | BadRecord:
    """Return the document, if the bytes are UTF-8 and not too many."""
    if bad := too_long(number, len(content)):
        return bad
    try:
        return Document(number, content.decode())
    except UnicodeDecodeError as error:
        return BadRecord(number, not_utf8(error))


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start} ({error.reason})"


# In the words of the files, not of Python.
_TYPES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def cut_text(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    """Return the whole file."""
    size = Path(path).stat().st_size
    return [Stretch(0, size, 0, size)]


def read_text(path: str, stretch: Stretch, text_key: str) -> Records:
    """Yield the file as one document."""
    with Path(path).open("rb") as file:
        yield decoded(0, file.read(LONGEST_DOCUMENT + 1))


def read_registered(read: Callable[[str], Iterable[str]], path: str, stretch: Stretch, text_key: str) -> Records:
    """Yield what a plugin's `read(path)` gives, one document each."""
    for number, text in enumerate(read(path), start=1):
        yield decoded(number, text.encode(errors="surrogatepass"))


_LONGEST_LINE = 2 * LONGEST_DOCUMENT  # bytes; escapes take room
_MOST_KEYS = 8  # of a record, told when it lacks the one asked for
_COMPRESSED = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
_ZST_BLOCK = 2**14  # compressed bytes; where one is damaged, what it held before that place is lost too


def cut_jsonl(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    size = Path(path).stat().st_size
    if path.endswith(_COMPRESSED):
        return [Stretch(0, size, 0, size)]
    stretches: list[Stretch] = []
    start, num_lines_before = 0, 0  # of the stretch that is being made
    place, num_lines = 0, 0  # of the block
    for block in blocks:
        begin = 0  # where the block is counted from
        # The first line that ends in this block after the stretch has grown long enough.
        while (end := block.find(b"\n", max(begin, start + piece_bytes - place)) + 1) > 0:
            num_lines += block.count(b"\n", begin, end)
            stretches.append(Stretch(start, place + end, num_lines_before, place + end - start))
            start, num_lines_before, begin = place + end, num_lines, end
        num_lines += block.count(b"\n", begin)
        place += len(block)
    if start < place:
        stretches.append(Stretch(start, place, num_lines_before, place - start))
    return stretches


def read_jsonl(path: str, stretch: Stretch, text_key: str) -> Records:
    number = stretch.num_records_before
    try:
        with _open(path) as file:
            left = math.inf  # bytes
            if not path.endswith(_COMPRESSED):
                file.seek(stretch.start)
                left = stretch.stop - stretch.start
            while left > 0 and (line := file.readline(_LONGEST_LINE)):
                number += 1
                left -= len(line)
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    left -= _skip_line(file)
                    yield BadRecord(number, f"a line longer than {_LONGEST_LINE} bytes; cut it into several")
                elif record := _parse(number, line, text_key):
                    yield record
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedZst) as error:
        # What came before it is whole; where the next line would begin nobody knows.
        yield BadRecord(number + 1, f"the rest of the file cannot be decompressed: {error}")


def _open(path: str) -> IO[bytes]:
    """Raises: ValueError if `zstandard` is needed and not installed. Reading raises DamagedZst, or as gzip."""
    if path.endswith(".gz"):
        return gzip.open(path)  # type: ignore[return-value]  # a file of bytes in all but name
    if path.endswith(".zst"):
        zstandard = import_extra("zstandard", "data", what=f"{path}: ")
        return io.BufferedReader(_ZstFrames(path, zstandard), 2**20)
    return Path(path).open("rb")


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while rest := file.readline(_LONGEST_LINE):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _parse(number: int, line: bytes, text_key: str) -> Document | BadRecord | None:
    """None for a line of white space."""
    if number == 1:
        line = line.removeprefix(_BOM)  # some editors' first three bytes
    if line.isspace() or not line:
        return None
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(number, not_utf8(error))
    except RecursionError:
        return BadRecord(number, "no JSON that can be read: nested too deep")
    except ValueError as error:
        return BadRecord(number, f"no JSON: {error}")
    if not isinstance(value, dict):
        return BadRecord(number, f"no JSON object but a {type(value).__name__}")
    if text_key not in value:
        keys = ", ".join(sorted(value)[:_MOST_KEYS]) or "none"
        return BadRecord(number, f"no key {text_key!r} (keys: {keys})")
    return checked(number, value[text_key], f"the value of {text_key!r}")


class DamagedZst(Exception):
    """The compressed bytes end too early or are damaged."""


class _ZstFrames(io.RawIOBase):
    """Frames one after the other. zstandard's own stream reader takes a file cut short for one that ends there."""

    def __init__(self, path: str, zstandard: Any) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by close()
        self._zstandard = zstandard
        self._frame: Any = None  # being decompressed
        self._compressed = b""  # read from the file, not used yet
        self._ready = memoryview(b"")  # decompressed, not taken yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer)
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(_ZST_BLOCK)
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
