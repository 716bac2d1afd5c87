"""PREFIX.idx of Megatron's token files: the places of sequences in PREFIX.bin, and the sequences of each document.

Layout, little-endian: magic 9 bytes, version u64, dtype code u8, sequence count u64, document count u64; sequence
lengths in tokens i32; sequence starts in bytes i64; index of each document's first sequence i64, closed by the
sequence count (so "document count" is the number of documents plus one). Files of images and text append one byte for
each sequence, its mode. The arrays stay on the disk: an index of 10^8 documents is 2 GB.
"""

import functools
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megamix.data.steady_file import DataError, FileArray, SteadyFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_CHUNK = 2**20  # sequences checked or written at a time
STRIDE = 64  # documents from one offset in memory to the next


@dataclass(eq=False)
class DocumentOffsets:
    """The offsets in tokens at which documents begin in the stream. The object behaves like an INT64 array
    (num_documents + 1,), read from the disk at each use.

    `offsets[5]` is an int, `offsets[a:b]` and `offsets[array]` are arrays. The last offset is the number of tokens.
    Offsets never decrease; an empty document has the offset of the next one.
    """

    starts: FileArray  # (num_sequences,): first byte of each sequence
    documents: FileArray  # (num_documents + 1,): first sequence of each document
    num_tokens: int
    itemsize: int

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: "int | np.integer | slice | NDArray[np.integer]") -> Any:
        sequences = np.asarray(self.documents[index], dtype=np.int64)
        offsets = np.full(sequences.shape, self.num_tokens, dtype=np.int64)
        inside = sequences < len(self.starts)  # the border behind the last sequence has no start of its own
        offsets[inside] = self.starts[sequences[inside]] // self.itemsize
        return offsets if sequences.ndim else int(offsets)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield all offsets in blocks, each with the number of its first document; a block begins with the last offset
        of the one before. Documents before the token `start` or behind `stop` are empty.
        """
        for first in range(0, len(self) - 1, _CHUNK):
            sequences = self.documents[first : first + _CHUNK + 1]
            begins = self.starts[int(sequences[0]) : int(sequences[-1]) + 1] // self.itemsize
            yield first, np.append(begins, self.num_tokens)[sequences - sequences[0]].clip(start, stop)

    def not_behind(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each place in the stream a document that begins there or before it. It is fewer than 64 documents
        before the last such document.
        """
        nearest: NDArray[np.int64] = np.searchsorted(self._some, places, side="right") - 1
        return nearest * STRIDE

    @functools.cached_property
    def _some(self) -> NDArray[np.int64]:
        """Return every STRIDE-th offset, so that no search reads the disk: 12.5 MB for 10^8 documents."""
        return np.concatenate([offsets[:-1:STRIDE] for _, offsets in self.blocks(0, self.num_tokens)])


class TokenIndex:
    """A checked PREFIX.idx.

    Raises: DataError naming the file, what is there, what was expected and the fix, if anything does not fit.
    """

    def __init__(self, path: Path) -> None:
        file = SteadyFile(path)
        num_sequences, num_borders, self.dtype = _read_header(file)
        starts_at = HEADER.size + 4 * num_sequences
        borders_at = starts_at + 8 * num_sequences
        self.sequence_lengths = FileArray(file, np.dtype("<i4"), HEADER.size, num_sequences)
        self.sequence_starts = FileArray(file, np.dtype("<i8"), starts_at, num_sequences)
        self.documents = FileArray(file, np.dtype("<i8"), borders_at, num_borders)
        self.num_documents = num_borders - 1
        self.num_tokens = self._check_sequences(path)
        self._check_documents(path)
        self.document_offsets = DocumentOffsets(
            self.sequence_starts, self.documents, self.num_tokens, self.dtype.itemsize
        )

    def _check_sequences(self, path: Path) -> int:
        """Check that every sequence begins where the one before it ends. Return the number of tokens."""
        num_tokens = 0
        for place in range(0, len(self.sequence_lengths), _CHUNK):
            lengths = self.sequence_lengths[place : place + _CHUNK].astype(np.int64)
            ends = num_tokens + np.cumsum(lengths)
            starts = (ends - lengths) * self.dtype.itemsize
            if (lengths < 0).any() or (starts != self.sequence_starts[place : place + _CHUNK]).any():
                raise DataError(
                    f"{path}: sequences do not lie end to end in the .bin; the index is damaged: write it again"
                )
            num_tokens = int(ends[-1])
        return num_tokens

    def _check_documents(self, path: Path) -> None:
        num_sequences = len(self.sequence_lengths)
        right = self.num_documents >= 0 and self.documents[0] == 0 and self.documents[-1] == num_sequences
        for place in range(0, len(self.documents), _CHUNK):
            borders = self.documents[place : place + _CHUNK + 1]
            right = right and not (borders[1:] < borders[:-1]).any()  # no np.diff: its differences can wrap
        if not right:
            raise DataError(f"{path}: document borders do not run from 0 to {num_sequences}; write it again")


def _read_header(file: SteadyFile) -> tuple[int, int, "np.dtype[np.generic]"]:
    """Return the number of sequences, the number of document borders and the dtype. Raises: DataError if the file has
    another size than they imply.
    """
    path = file.path
    if file.size < HEADER.size:
        raise DataError(f"{path} has {file.size} bytes, the header alone has {HEADER.size}; copy it again")
    magic, version, code, num_sequences, num_borders = HEADER.unpack(file.read(0, HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{path} starts with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}: "
            "it is no token index; point the prefix at files in Megatron's .bin/.idx format"
        )
    if code not in DTYPES:
        raise DataError(f"{path} has dtype code {code}, expected one of 1 to 8; write it again")
    # The counts are compared with the file's size before anything is read by them.
    expected = HEADER.size + (4 + 8) * num_sequences + 8 * num_borders
    if num_sequences and file.size == expected + num_sequences:
        raise DataError(
            f"{path} holds a mode for each of its {num_sequences} sequences, as files of images and text do; "
            "only text can be read: write it without modes"
        )
    if file.size != expected:
        raise DataError(
            f"{path} has {file.size} bytes, its header says {num_sequences} sequences and {num_borders} document "
            f"borders = {expected} bytes; the copy is incomplete or damaged: copy or write it again"
        )
    return num_sequences, num_borders, np.dtype(DTYPES[code])


def write_index(file: IO[bytes], dtype: "np.dtype[np.integer]", lengths: IO[bytes]) -> None:
    """Write the PREFIX.idx of documents of one sequence each, in stretches, so that memory does not grow with their
    number. `lengths` holds each one's number of tokens as i32, and must be positioned at its end.
    """
    count = lengths.tell() // 4
    file.write(HEADER.pack(MAGIC, VERSION, _CODES[dtype], count, count + 1))
    lengths.seek(0)
    shutil.copyfileobj(lengths, file)
    lengths.seek(0)
    start = 0  # bytes
    while stretch := lengths.read(4 * _CHUNK):
        sizes = np.frombuffer(stretch, "<i4").astype(np.int64) * dtype.itemsize
        ends = start + np.cumsum(sizes)
        file.write((ends - sizes).astype("<i8").tobytes())
        start = int(ends[-1])
    for border in range(0, count + 1, _CHUNK):
        file.write(np.arange(border, min(border + _CHUNK, count + 1), dtype="<i8").tobytes())
