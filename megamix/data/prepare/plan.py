"""A corpus cut into pieces of work: each is encoded on its own, by any worker, and kept when prepare is stopped."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megamix.data.prepare.corpus import Corpus, CorpusFile
from megamix.data.prepare.json_records import cut_jsonl, elements, lines, read_json
from megamix.data.prepare.records import Blocks, Record, Records, Stretch, cut_text, read_registered, read_text
from megamix.data.prepare.tables import cut_arrow, cut_parquet, read_arrow, read_parquet
from megamix.machine import num_cores
from megamix.plugins import READERS

PIECE_BYTES = 2**24  # a second or two of work: what a kill costs, and what the last worker may be late


class Reader(NamedTuple):
    """Two functions for a kind of file. What is wrong with one record is a BadRecord, with the request a ValueError."""

    cut: Callable[[str, Blocks, int], list[Stretch]]  # what of a file can be read on its own, in order
    read: Callable[[str, Stretch, str], Records]  # its records, in order; never holds the whole file


_READERS = {
    "text": Reader(cut_text, read_text),
    "jsonl": Reader(cut_jsonl, partial(read_json, lines)),
    "json": Reader(cut_text, partial(read_json, elements)),
    "parquet": Reader(cut_parquet, read_parquet),
    "arrow": Reader(cut_arrow, read_arrow),
}


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file as it was when it was hashed."""

    file: CorpusFile
    num_bytes: int
    mtime_ns: int
    sha256: str
    stretches: tuple[Stretch, ...]
    reader: Reader  # not by its name: a worker imports the plugin that it is of


@dataclass(frozen=True, slots=True)
class CorpusPiece:
    """Stretches in order, each with the file it is part of."""

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


def make_plan(corpus: Corpus, piece_bytes: int = PIECE_BYTES) -> Plan:
    """Read every file once, for its checksum and for where it can be cut.

    Where the pieces begin changes no byte of the result. Raises: ValueError if a package for a file is missing.
    """
    with ThreadPoolExecutor(num_cores()) as threads:  # hashing holds no lock of Python's
        files = tuple(threads.map(lambda file: _plan_file(file, piece_bytes), corpus.files))
    pieces: list[CorpusPiece] = []
    waiting: list[tuple[PlannedFile, Stretch]] = []
    num_bytes = 0
    for file in files:
        for stretch in file.stretches:
            waiting.append((file, stretch))
            num_bytes += stretch.num_bytes
            if num_bytes >= piece_bytes:
                pieces.append(CorpusPiece(tuple(waiting)))
                waiting, num_bytes = [], 0
    if waiting:
        pieces.append(CorpusPiece(tuple(waiting)))
    return Plan(files, tuple(pieces))


def _plan_file(file: CorpusFile, piece_bytes: int) -> PlannedFile:
    path = Path(file.path)
    before = path.stat()
    blocks = Blocks(path)
    reader = _READERS.get(file.kind) or Reader(cut_text, partial(read_registered, READERS.registered[file.kind]))
    stretches = reader.cut(file.path, blocks, piece_bytes)
    return PlannedFile(file, before.st_size, before.st_mtime_ns, blocks.sha256(), tuple(stretches), reader)


def read_piece(piece: CorpusPiece, text_key: str) -> Iterator[tuple[CorpusFile, Record]]:
    """Yield its records in order; holds the memory of one at a time, about.

    Raises: ValueError if a file is no longer what the plan saw: its checksum in the manifest would be a lie.
    """
    for planned, stretch in piece.stretches:
        for record in planned.reader.read(planned.file.path, stretch, text_key):
            yield planned.file, record
        now = os.stat(planned.file.path)
        if (now.st_size, now.st_mtime_ns) != (planned.num_bytes, planned.mtime_ns):
            raise ValueError(f"{planned.file.path} changed while it was being read; run prepare again")
