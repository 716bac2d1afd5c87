"""The plan that cuts a corpus into pieces of work. Any worker encodes a piece, on its own; a piece is kept if prepare
is stopped.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from megamix.base.machine import memory_for_each, num_cores
from megamix.base.progress import ProgressLine
from megamix.data.prepare.compressed import is_named, window_bytes
from megamix.data.prepare.corpus import Corpus, CorpusFile
from megamix.data.prepare.faults import fault_of
from megamix.data.prepare.json_records import elements, lines, read_json
from megamix.data.prepare.records import BadRecord, Record, Records, Stretch, read_registered, read_text
from megamix.data.prepare.tables import arrow_columns, cut_parquet, parquet_columns, read_table
from megamix.data.steady_file import file_fingerprint
from megamix.plugins import COMPRESSIONS, READERS

T = TypeVar("T")
PIECE_BYTES = 2**24  # bytes of a piece, a second or two of work: a kill loses it, the last worker may be late by it
_BLOCK = 2**22
# A reader yields a stretch's records in order, and never holds the whole file. A fault of a record is a BadRecord, a
# fault of the request is a ValueError.
_READERS: dict[str, Callable[[str, str, Stretch], Records]] = {
    "text": read_text,
    "jsonl": partial(read_json, lines),
    "json": partial(read_json, elements),
    "parquet": partial(read_table, parquet_columns),
    "arrow": partial(read_table, arrow_columns),
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file in the state in which it was hashed."""

    file: CorpusFile
    num_bytes: int
    mtime_ns: int
    sha256: str
    read: Callable[[Stretch], Records]  # no name: unpickling the function in a worker imports its plugin
    fault: str  # why nothing of it can be read, as far as its first bytes or its footer tell; empty if something can
    full_bytes: int  # bytes of the file for which a Git LFS pointer stands, otherwise num_bytes


class CorpusPiece(NamedTuple):
    """A piece of work: stretches in order, each with its file."""

    stretches: tuple[tuple[PlannedFile, Stretch], ...]

    @property
    def num_bytes(self) -> int:
        return sum(stretch.num_bytes for _, stretch in self.stretches)


class Plan(NamedTuple):
    files: tuple[PlannedFile, ...]
    pieces: tuple[CorpusPiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        return {file.file.path: file.full_bytes for file in self.files}

    def num_workers(self, wanted: int) -> int:
        """Return how many workers may read at once: the largest windows that they may meet must fit in half of this
        machine's memory. A window may take 2 GiB, and each worker reads one file at a time.
        """
        windows = sorted((window_bytes(file.file.path) for file in self.files), reverse=True)
        wanted = min(wanted, len(self.pieces))
        while wanted > 1 and sum(windows[:wanted]) > memory_for_each(1)[0] / 2:
            wanted -= 1
        return wanted


def make_plan(corpus: Corpus, progress: ProgressLine, text_key: str = "text", piece_bytes: int = PIECE_BYTES) -> Plan:
    """Read every file once, for its checksum and for the places where it can be cut.

    The borders of pieces change no byte of the result. Raises: ValueError if a package for a file is missing.
    """
    total = sum(os.path.getsize(file.path) for file in corpus.files)
    progress.begin(f"checksums of {len(corpus.files):,} file(s)", total)
    files = list[PlannedFile]()
    stretches = list[tuple[PlannedFile, Stretch]]()
    with ThreadPoolExecutor(num_cores()) as threads:  # hashing releases the interpreter's lock
        for planned, cut in threads.map(lambda file: _plan_file(file, text_key, piece_bytes), corpus.files):
            files.append(planned)
            stretches += [(planned, stretch) for stretch in cut]
            progress.advance(planned.num_bytes)
    pieces = grouped(stretches, lambda pair: pair[1].num_bytes, piece_bytes)
    return Plan(tuple(files), tuple(CorpusPiece(tuple(piece)) for piece in pieces))


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in groups: a group ends with the item by which its sizes add up to `most` or more."""
    group = list[T]()
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


def _plan_file(file: CorpusFile, text_key: str, piece_bytes: int) -> tuple[PlannedFile, list[Stretch]]:
    """Return the file as it is now, and the stretches in which it is read."""
    path, before = file.path, os.stat(file.path)
    num_bytes = before.st_size
    fault, pointed_bytes = (file.passed_over, 0) if file.passed_over else fault_of(path, file.kind)
    reader = _READERS.get(file.kind) or partial(read_registered, READERS.registered[file.kind])
    if file.kind == "jsonl" and not fault and not is_named(path, COMPRESSIONS):
        sha256, stretches = _cut_lines(path, piece_bytes)
    else:
        sha256 = file_fingerprint(Path(path))
        is_cut = file.kind == "parquet" and not fault
        stretches = cut_parquet(path) if is_cut else [Stretch(0, sys.maxsize, 0, num_bytes)]
    read, full_bytes = partial(reader, path, text_key), pointed_bytes or num_bytes
    return PlannedFile(file, num_bytes, before.st_mtime_ns, sha256, read, fault, full_bytes), stretches


def _cut_lines(path: str, piece_bytes: int) -> tuple[str, list[Stretch]]:
    """Return the SHA-256, and stretches of whole lines, each of `piece_bytes` or some more."""
    digest = hashlib.sha256()
    borders = [(0, 0)]  # of stretches: the first byte, and the lines before it
    place, num_lines = 0, 0  # first byte of the block, and lines counted so far
    with open(path, "rb", buffering=0) as file:
        while block := file.read(min(piece_bytes, _BLOCK)):
            digest.update(block)
            end = place + block.find(b"\n") + 1
            if end > place and end - borders[-1][0] >= piece_bytes:
                borders.append((end, num_lines + 1))
            num_lines += block.count(b"\n")
            place += len(block)
    borders.append((place, num_lines))
    return digest.hexdigest(), [
        Stretch(start, end, before, end - start) for (start, before), (end, _) in pairwise(borders) if start < end
    ]


def read_piece(piece: CorpusPiece) -> Iterator[tuple[PlannedFile, int, Record]]:
    """Yield a piece's records in order, each with its number in its file, from 1. Memory holds about one at a time.

    Raises: ValueError if a file has changed since it was planned: its checksum in the manifest would be wrong.
    """
    for planned, stretch in piece.stretches:
        records = [BadRecord(planned.fault)] if planned.fault else planned.read(stretch)
        for number, record in enumerate(records, start=stretch.num_records_before + 1):
            yield planned, number, record
        now = os.stat(planned.file.path)
        if (now.st_size, now.st_mtime_ns) != (planned.num_bytes, planned.mtime_ns):
            raise ValueError(f"{planned.file.path} changed while it was being read; run prepare again")
