"""The records that readers of files yield: documents and bad records, each with its place in the file. And the reader
of text files, each of which is one document.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from megamix.data.prepare.compressed import DAMAGE, open_plain

# Bytes. While a record is encoded, memory holds it in several forms, one of them its token ids as Python numbers.
LONGEST_DOCUMENT = 2**26
_BLOCK = 2**22
NOT_UTF8 = "not UTF-8"  # how the reason of such a bad record begins


class Document(NamedTuple):
    number: int  # line or row, from 1; 0: the whole file
    text: str


class BadRecord(NamedTuple):
    number: int
    reason: str


Record: TypeAlias = Document | BadRecord
Records: TypeAlias = Iterator[Record]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a file, in the unit of its reader: bytes, row groups or batches."""

    start: int
    stop: int
    num_records_before: int
    num_bytes: int  # approximate measure of the work


class Blocks:
    """A file's bytes in blocks, hashed as they are read, so that the functions that cut a file read nothing twice.

    Each block reuses the memory of the one before.
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
        """Read the rest of the file, close it, and return the hash of the whole file, in hexadecimal."""
        with self._file:
            for _ in self:
                pass
        return self._digest.hexdigest()


def checked(number: int, value: object, name: str) -> Record:
    """Return the document if the value is text that UTF-8 can hold and is not too long; otherwise a bad record.

    `name`: the user's name of the value.
    """
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


def decoded(number: int, content: bytes) -> Record:
    """Return the document if the bytes are UTF-8 and not too many; otherwise a bad record."""
    if bad := too_long(number, len(content)):
        return bad
    try:
        return Document(number, content.decode())
    except UnicodeDecodeError as error:
        return BadRecord(number, not_utf8(error))


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"{NOT_UTF8}: byte 0x{error.object[error.start]:02x} at {error.start} ({error.reason})"


# Names of types as the files have them, not Python's.
_TYPES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def cut_text(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    """Return the whole file as one stretch."""
    size = Path(path).stat().st_size
    return [Stretch(0, size, 0, size)]


def read_text(path: str, stretch: Stretch, text_key: str) -> Records:
    """Yield the file as one document."""
    try:
        with open_plain(path) as file:
            yield decoded(0, file.read(LONGEST_DOCUMENT + 1))
    except DAMAGE as error:
        yield BadRecord(0, f"the file cannot be read: {error}")


def read_registered(read: Callable[[str], Iterable[str]], path: str, stretch: Stretch, text_key: str) -> Records:
    """Yield a document for each text of a plugin's `read(path)`."""
    for number, text in enumerate(read(path), start=1):
        yield decoded(number, text.encode(errors="surrogatepass"))
