"""The records that readers of files yield, one for each place in a file: documents, bad records, or nothing. And the
reader of text files, each of which is one document.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from megamix.data.prepare.compressed import DAMAGE, open_plain

# Bytes. While a record is encoded, memory holds it in several forms, one of them its token ids as Python numbers.
LONGEST_DOCUMENT = 2**26
BOM = b"\xef\xbb\xbf"  # some editors begin a file with these three bytes, which are no part of its text


class BadRecord(NamedTuple):
    reason: str
    num_bytes: int | None = None  # bytes of the record; None: the file cannot be read from here on, and counts whole


# A document's text, empty for a null, or what is in its place; None: white space between records.
Record: TypeAlias = str | BadRecord | None
Records: TypeAlias = Iterator[Record]


class Stretch(NamedTuple):
    """Part of a file, in the unit of its reader: bytes or row groups."""

    start: int
    stop: int  # sys.maxsize: the end of the file
    num_records_before: int
    num_bytes: int  # approximate measure of the work


def checked(value: object, name: str) -> Record:
    """Return the document if the value is text that UTF-8 can hold and is not too long; otherwise a bad record.

    `name`: the user's name of the value.
    """
    if not isinstance(value, str):
        return BadRecord(f"{name} is {_TYPES.get(type(value), 'a number')}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return BadRecord(f"{name} holds half a surrogate pair at character {error.start}")
    return too_long(len(value)) or value


def too_long(size: int) -> BadRecord | None:
    if size <= LONGEST_DOCUMENT:
        return None
    return BadRecord(f"longer than {LONGEST_DOCUMENT} bytes, the most of one document; cut it into several", size)


def decoded(content: bytes) -> Record:
    """Return the document if the bytes are UTF-8 and not too many; otherwise a bad record."""
    try:
        return too_long(len(content)) or content.decode()
    except UnicodeDecodeError as error:
        return BadRecord(not_utf8(error), len(content))


def not_utf8(error: UnicodeDecodeError) -> str:
    encoding = "utf-16" if error.object.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
    place = f"byte 0x{error.object[error.start]:02x} at {error.start}"
    return f"not UTF-8: {place} ({error.reason}); perhaps iconv -f {encoding} -t utf-8 IN > OUT re-encodes it"


# Names of types as the files have them, not Python's.
_TYPES = {bool: "true or false", list: "a list", dict: "an object"}


def read_text(path: str, text_key: str, stretch: Stretch) -> Records:
    try:
        with open_plain(path) as file:
            record = decoded(file.read(LONGEST_DOCUMENT + 1).removeprefix(BOM))
    except DAMAGE as error:
        record = BadRecord(f"the file cannot be read: {error}")
    yield record._replace(num_bytes=None) if isinstance(record, BadRecord) else record


def read_registered(read: Callable[[str], Iterable[str]], path: str, text_key: str, stretch: Stretch) -> Records:
    """Yield a document for each text of a plugin's `read(path)`."""
    for text in read(path):
        yield decoded(text.encode(errors="surrogatepass"))
