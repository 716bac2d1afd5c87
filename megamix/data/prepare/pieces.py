"""The encoding of a corpus's pieces, each on its own, and their joining in order to the files that training reads."""

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from megamix.base.durable import written_aside
from megamix.data.prepare.lost import Line, line_of
from megamix.data.prepare.plan import CorpusPiece, grouped, read_piece
from megamix.data.prepare.records import BadRecord
from megamix.data.prepare.split import DocumentInPart, Split
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.token_file import token_dtype, token_file_writer
from megamix.data.tokenizer import open_tokenizer

PARTS = ("train", "valid")
_CHUNK_TOKENS = 2**20  # tokens of a file of a piece: a piece may be of any size, and memory holds a file
_MORE_TOKENS = 2**6  # added to each document's own, for what Python takes beside them
_BATCH_CHARACTERS = 2**20  # characters of a batch: few enough to hold in memory with their token ids
_MORE_CHARACTERS = 2**12  # added to each document's own: a batch is 256 short ones at most, enough for all threads


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """The settings that all pieces of one prepare share."""

    folder: Path  # folder of the finished pieces
    tokenizer: Path
    end_token: str
    fast: bool  # whether a faster encoder is used, which was found to give equal ids
    split: Split
    max_bad_records: int

    def report_path(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"

    def chunk_path(self, number: int, chunk: int) -> Path:
        return self.folder / f"{number:06}.{chunk}.npz"

    def chunks(self, number: int, report: "PieceReport") -> Iterator[dict[str, NDArray[np.integer]]]:
        """Yield a piece's documents, a file at a time: `tokens` of all, and of each its number of tokens in `lengths`,
        `draws`, `valid` and `num_bytes`. Raises: BadZipFile for damage, which the file's checksums show.
        """
        for chunk in range(report.num_chunks):
            with np.load(self.chunk_path(number, chunk)) as arrays:
                yield dict(arrays)

    def finished_report(self, number: int) -> "PieceReport | None":
        """Return the piece's report; None if the piece is not whole. Pieces are not synced to the disk, which would
        take a fifth of the time or more: a power cut may damage them.
        """
        try:
            report = PieceReport(**json.loads(self.report_path(number).read_text(encoding="utf-8")))
            for _ in self.chunks(number, report):
                pass
            return report
        except (OSError, ValueError, TypeError, EOFError, BadZipFile):
            return None


@dataclass(slots=True)
class PieceReport:
    """Facts about a piece, without those about single documents."""

    num_valid: int = 0  # documents
    num_empty: int = 0
    left_out: list[Line] = field(default_factory=list)
    least_draw: int = 2**64  # least draw among the documents in train, or more than any draw
    num_chunks: int = 0  # files of documents; 0: there is none


@functools.cache
def opened_tokenizer(job: EncodingJob) -> TextTokenizer:
    """Open a job's tokenizer once per process."""
    tokenizer = open_tokenizer(job.tokenizer, job.end_token)
    if job.fast:
        tokenizer.speed_up(())  # no texts: the ids were compared before the job began
    return tokenizer


def encode_piece(job: EncodingJob, piece: CorpusPiece, number: int) -> PieceReport:
    """Write the piece's files, its report last: a piece with a report is whole. A piece with more bad records than the
    whole corpus may have is given up, and gets no report.

    Raises: ValueError if a file cannot be read as the request says.
    """
    report = PieceReport()
    documents = documents_of(piece, job.split, report, job.max_bad_records)
    for chunk in grouped(_encoded(job, documents), lambda pair: pair[1].size + _MORE_TOKENS, _CHUNK_TOKENS):
        with written_aside(job.chunk_path(number, report.num_chunks), sync=False) as file:
            np.savez(
                file,
                tokens=np.concatenate([token_ids for _, token_ids in chunk]),
                lengths=[token_ids.size for _, token_ids in chunk],
                draws=np.array([document.draw for document, _ in chunk], np.uint64),
                valid=[document.valid for document, _ in chunk],
                num_bytes=[document.num_bytes for document, _ in chunk],
            )
        report.num_chunks += 1
    if len(report.left_out) <= job.max_bad_records:
        with written_aside(job.report_path(number), sync=False) as file:
            file.write(json.dumps(asdict(report)).encode())
    return report


def _encoded(
    job: EncodingJob, documents: Iterator[DocumentInPart]
) -> Iterator[tuple[DocumentInPart, NDArray[np.integer]]]:
    tokenizer = opened_tokenizer(job)
    dtype = token_dtype(tokenizer.vocab_size)
    for batch in grouped(documents, lambda document: len(document.text) + _MORE_CHARACTERS, _BATCH_CHARACTERS):
        encoded = tokenizer.encode_documents([document.text for document in batch])
        for document, token_ids in zip(batch, encoded, strict=True):
            assert 0 <= token_ids.min() <= token_ids.max() < tokenizer.vocab_size, document.text
            yield document._replace(text=""), token_ids.astype(dtype)


def documents_of(
    piece: CorpusPiece, split: Split, report: PieceReport, max_bad_records: int = sys.maxsize
) -> Iterator[DocumentInPart]:
    """Yield the documents of a piece, and stop at one bad record too many. The report counts those that validate,
    empty ones and bad records.
    """
    for planned, number, record in read_piece(piece):
        if isinstance(record, BadRecord):
            report.left_out.append(line_of(planned, number, record))
            if len(report.left_out) > max_bad_records:
                return
        elif record == "":
            report.num_empty += 1
        elif record:
            document = split.place(planned.file, record)
            report.num_valid += document.valid
            if not document.valid:
                report.least_draw = min(report.least_draw, document.draw)
            yield document


def merge_pieces(
    job: EncodingJob, reports: Sequence[PieceReport], folder: Path, vocab_size: int
) -> dict[str, dict[str, int]]:
    """Write train and valid. Return the number of documents, tokens and bytes of text of each.

    If no document validates, as in a small corpus, the one with the least draw moves there, and all equal to it.
    Raises: ValueError if no document would be left to train on.
    """
    parts = PARTS if job.split.valid_fraction else PARTS[:1]
    moves = job.split.valid_fraction and not any(report.num_valid for report in reports)
    least = min(report.least_draw for report in reports)
    num_bytes = dict.fromkeys(parts, 0)
    with ExitStack() as stack:
        writers = {part: stack.enter_context(token_file_writer(folder / part, vocab_size)) for part in parts}
        for number, report in enumerate(reports):
            for chunk in job.chunks(number, report):
                valid = chunk["draws"] == least if moves else chunk["valid"]
                for part, taken in zip(parts, (~valid, valid), strict=False):
                    tokens = chunk["tokens"][np.repeat(taken, chunk["lengths"])]
                    writers[part].add(tokens, chunk["lengths"][taken])
                    num_bytes[part] += int(chunk["num_bytes"][taken].sum())
    if not writers["train"].num_documents:
        raise ValueError(
            f"--valid-fraction {job.split.valid_fraction} leaves none of {writers['valid'].num_documents} document(s) "
            "to train on; a .txt file is one: split it into a new folder (split -n l/20 --additional-suffix=.txt FILE "
            "parts/)"
        )
    return {
        part: {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens, "num_bytes": num_bytes[part]}
        for part, writer in writers.items()
    }
