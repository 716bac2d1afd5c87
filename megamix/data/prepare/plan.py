"""The plan that cuts a corpus into pieces of work. Any worker encodes a piece, on its own; a piece is kept if prepare
is stopped.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from megamix.data.prepare.corpus import Corpus, CorpusFile
from megamix.data.prepare.json_records import cut_jsonl, elements, lines, read_json
from megamix.data.prepare.records import Blocks, Record, Records, Stretch, cut_text, read_registered, read_text
from megamix.data.prepare.tables import cut_arrow, cut_parquet, read_arrow, read_parquet
from megamix.machine import num_cores
from megamix.plugins import READERS
from megamix.progress import ProgressLine

T = TypeVar("T")
PIECE_BYTES = 2**24  # bytes of a piece, a second or two of work: a kill loses it, the last worker may be late by it


class Reader(NamedTuple):
    """Two functions for a kind of file. A fault of a record is a BadRecord, a fault of the request is a ValueError."""

    cut: Callable[[str, Blocks, int], list[Stretch]]  # cuts a file into stretches to be read alone, in order
    read: Callable[[str, Stretch, str], Records]  # yields a stretch's records in order; never holds the whole file


_READERS = {
    "text": Reader(cut_text, read_text),
    "jsonl": Reader(cut_jsonl, partial(read_json, lines)),
    "json": Reader(cut_text, partial(read_json, elements)),
    "parquet": Reader(cut_parquet, read_parquet),
    "arrow": Reader(cut_arrow, read_arrow),
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file in the state in which it was hashed."""

    file: CorpusFile
    num_bytes: int
    mtime_ns: int
    sha256: str
    stretches: tuple[Stretch, ...]
    reader: Reader  # the functions and not their name: unpickling them in a worker imports their plugin


@dataclass(frozen=True, slots=True)
class CorpusPiece:
    """A piece of work: stretches in order, each with its file."""

    stretches: tuple[tuple[PlannedFile, Stretch], ...]

    @property
    def num_bytes(self) -> int:
        return sum(stretch.num_bytes for _, stretch in self.stretches)


@dataclass(frozen=True, slots=True)
class Plan:
    files: tuple[PlannedFile, ...]
    pieces: tuple[CorpusPiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def make_plan(corpus: Corpus, piece_bytes: int = PIECE_BYTES, progress: ProgressLine | None = None) -> Plan:
    """Read every file once, for its checksum and for the places where it can be cut.

    The borders of pieces change no byte of the result. Raises: ValueError if a package for a file is missing.
    """
    progress = progress or ProgressLine()
    total = sum(os.path.getsize(file.path) for file in corpus.files)
    progress.begin(f"checksums of {len(corpus.files):,} file(s)", total)
    files: list[PlannedFile] = []
    with ThreadPoolExecutor(num_cores()) as threads:  # hashing releases the interpreter's lock
        for planned in threads.map(lambda file: _plan_file(file, piece_bytes), corpus.files):
            files.append(planned)
            progress.advance(planned.num_bytes)
    stretches = ((file, stretch) for file in files for stretch in file.stretches)
    pieces = grouped(stretches, lambda pair: pair[1].num_bytes, piece_bytes)
    return Plan(tuple(files), tuple(CorpusPiece(tuple(piece)) for piece in pieces))


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in groups: a group ends with the item by which its sizes add up to `most` or more."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


def _plan_file(file: CorpusFile, piece_bytes: int) -> PlannedFile:
    path = Path(file.path)
    before = path.stat()
    blocks = Blocks(path)
    reader = _READERS.get(file.kind) or Reader(cut_text, partial(read_registered, READERS.registered[file.kind]))
    stretches = reader.cut(file.path, blocks, piece_bytes)
    return PlannedFile(file, before.st_size, before.st_mtime_ns, blocks.sha256(), tuple(stretches), reader)


def read_piece(piece: CorpusPiece, text_key: str) -> Iterator[tuple[CorpusFile, Record]]:
    """Yield a piece's records in order. Memory holds about one record at a time.

    Raises: ValueError if a file has changed since it was planned: its checksum in the manifest would be wrong.
    """
    for planned, stretch in piece.stretches:
        for record in planned.reader.read(planned.file.path, stretch, text_key):
            yield planned.file, record
        now = os.stat(planned.file.path)
        if (now.st_size, now.st_mtime_ns) != (planned.num_bytes, planned.mtime_ns):
            raise ValueError(f"{planned.file.path} changed while it was being read; run prepare again")
