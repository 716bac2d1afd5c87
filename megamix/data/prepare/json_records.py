"""Readers of JSON: one object per line; or arrays of objects, or objects over several lines. Files may be compressed by
gzip or Zstandard.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from megamix.data.prepare.compressed import DAMAGE, DamagedFile, open_plain
from megamix.data.prepare.records import BOM, LONGEST_DOCUMENT, BadRecord, Record, Records, Stretch, checked, not_utf8

_LONGEST_RECORD = 2 * LONGEST_DOCUMENT  # bytes of a record: escapes make it longer than its text
_MOST_KEYS = 8  # keys that a message names of a record without the wanted one
_BLOCK = 2**20  # bytes
# The beginning of a file whose records are not lines: an array, or an object whose first line is only its bracket.
_NO_LINES = re.compile(rb"(?:%s)?\s*(?:\[|\{[ \t\r]*\n)" % BOM)
# Matches up to the next bracket or comma outside of strings, in text without escapes.
_STEP = re.compile(rb'(?:[^"\[\]{},]++|"[^"]*+")*+([\[\]{},])')

Parts: TypeAlias = Callable[[str, Stretch], Iterator[tuple[bytes, int]]]


def json_kind(head: bytes) -> str:
    """Return the kind of a .json, by its first bytes: "jsonl" if its records are lines, otherwise "json"."""
    return "json" if _NO_LINES.match(head) else "jsonl"


def read_json(parts: Parts, path: str, text_key: str, stretch: Stretch) -> Records:
    """Yield the records, one from each part of the file. `parts`: `lines` or `elements`."""
    try:
        for number, (part, size) in enumerate(parts(path, stretch), stretch.num_records_before):
            record = _parse(part if number else part.removeprefix(BOM), text_key)
            yield record._replace(num_bytes=size) if isinstance(record, BadRecord) else record
    except DAMAGE as error:  # records before it are whole
        yield BadRecord(f"the rest of the file cannot be read: {error}")


def lines(path: str, stretch: Stretch) -> Iterator[tuple[bytes, int]]:
    """Yield the lines, each with its bytes. A line that is too long is cut one byte beyond the limit."""
    with open_plain(path) as file:
        if stretch.start:  # only of a file that is not compressed, which cannot seek
            file.seek(stretch.start)
        left = stretch.stop - stretch.start
        while left > 0 and (line := file.readline(_LONGEST_RECORD + 1)):
            end, size = line, len(line)
            while len(end) >= _LONGEST_RECORD and not end.endswith(b"\n"):
                end = file.readline(_LONGEST_RECORD)
                size += len(end)
            left -= size
            yield line, size


def elements(path: str, stretch: Stretch) -> Iterator[tuple[bytes, int]]:
    """Yield the elements of an array, or objects that follow each other. Only brackets, commas and quotes are examined:
    any other fault of an element does not affect its neighbours. Each comes with its bytes.
    """
    text, start, place = b"", 0, 0  # start: the element's beginning; place: the end of the brackets counted so far
    depth, in_array = 0, 0  # depth: open brackets; in_array: 1 within an array of elements
    with open_plain(path) as file:
        # Each block is longer than the record so far, since a long record is examined again with each block.
        while block := file.read(_BLOCK + len(text) - start):
            text, start, place = text[start:] + block, 0, place - start
            plain = text.replace(rb"\\", b"..").replace(rb"\"", b"..")
            while step := _STEP.match(plain, place):
                place, mark = step.end(), step[1]
                depth += (mark in b"[{") - (mark in b"]}")
                if depth == 1 and mark == b"[":
                    start, in_array = place, 1
                elif not depth or (mark == b"," and depth == in_array):
                    yield text[start : place - in_array], place - in_array - start
                    start, in_array = place, depth
            if len(text) - start > _LONGEST_RECORD:
                raise DamagedFile(f"a record longer than {_LONGEST_RECORD} bytes, or a bracket or quote is missing")
    if depth or text[start:].strip():
        raise DamagedFile("the file ends within an array or object")


def _parse(content: bytes, text_key: str) -> Record:
    if len(content) > _LONGEST_RECORD:
        return BadRecord(f"a record longer than {_LONGEST_RECORD} bytes; cut it into several")
    if not content.strip():
        return None
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        return BadRecord(not_utf8(error))
    except (ValueError, RecursionError) as error:
        return BadRecord(f"no JSON: {error}")
    if not isinstance(value, dict):
        return BadRecord(f"no JSON object but a {type(value).__name__}")
    if text_key not in value:
        keys = ", ".join(sorted(value)[:_MOST_KEYS]) or "none"
        return BadRecord(f"no key {text_key!r} (keys: {keys}; --text-key names another)")
    return "" if value[text_key] is None else checked(value[text_key], f"the value of {text_key!r}")
