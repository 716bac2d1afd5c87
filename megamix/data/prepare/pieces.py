"""The encoding of a corpus's pieces, each on its own, and their joining in order to the files that training reads."""

import functools
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from megamix.data.prepare.lost import Line, line_of
from megamix.data.prepare.plan import CorpusPiece, grouped, read_piece
from megamix.data.prepare.records import BadRecord
from megamix.data.prepare.split import DocumentInPart, Split
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.token_file import TokenFileWriter, bin_path, idx_path
from megamix.data.tokenizer import open_tokenizer
from megamix.durable import written_aside

PARTS = ("train", "valid")
_BLOCK = 2**22
_BATCH_CHARACTERS = 2**20  # characters of a batch: few enough to hold in memory with their token ids
_MORE_CHARACTERS = 2**12  # added to each document's own: a batch is 256 short ones at most, enough for all threads
Moved = dict[int, list[list[int]]]  # by piece, documents that move from train to valid: number and bytes


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """The settings that all pieces of one prepare share."""

    folder: Path  # folder of the finished pieces
    tokenizer: Path
    end_token: str
    fast: bool  # whether a faster encoder is used, which was found to give equal ids
    text_key: str
    split: Split
    max_bad_records: int

    def prefix(self, number: int, part: str) -> Path:
        """Return the prefix of a piece's token files."""
        return self.folder / f"{number:06}.{part}"

    def report_path(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"

    def checksums(self, number: int) -> list[int]:
        """Return the CRC-32 of each of a piece's token files."""
        prefixes = [self.prefix(number, part) for part in PARTS]
        return [_crc32(path) for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]

    def finished_report(self, number: int) -> "PieceReport | None":
        """Return the piece's report; None if the piece is not whole. Pieces are not synced to the disk, which would
        take a fifth of the time or more. After a power cut the checksums show damage.
        """
        try:
            report = PieceReport(**json.loads(self.report_path(number).read_text(encoding="utf-8")))
            return report if report.checksums == self.checksums(number) else None
        except (OSError, ValueError, TypeError):
            return None


@dataclass(slots=True)
class PieceReport:
    """Facts about a piece that its token files do not hold."""

    num_documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))  # bytes of text, as UTF-8
    num_empty: int = 0
    left_out: list[Line] = field(default_factory=list)
    least_draw: int | None = None  # least draw among the documents in train
    drew_least: list[list[int]] = field(default_factory=list)  # number and bytes of the documents with the least draw
    checksums: list[int] = field(default_factory=list)  # CRC-32 of each token file


@functools.lru_cache(1)
def opened_tokenizer(job: EncodingJob) -> TextTokenizer:
    """Return the tokenizer of a job. A process opens it once: opening it takes longer than encoding a small piece."""
    tokenizer = open_tokenizer(job.tokenizer, job.end_token)
    if job.fast:
        tokenizer.speed_up(())  # no texts: the ids were compared before the job began
    return tokenizer


def encode_piece(job: EncodingJob, piece: CorpusPiece, number: int) -> PieceReport:
    """Write the piece's files, its report last: a piece with a report is whole. A piece with more bad records than the
    whole corpus may have is given up, and gets no report.

    Raises: ValueError if a file cannot be read as the request says.
    """
    tokenizer, report = opened_tokenizer(job), PieceReport()
    writers = {part: TokenFileWriter(job.prefix(number, part), tokenizer.vocab_size, sync=False) for part in PARTS}
    with writers["train"], writers["valid"]:
        documents = documents_of(piece, job.text_key, job.split, report, job.max_bad_records)
        for batch in grouped(documents, lambda document: len(document.text) + _MORE_CHARACTERS, _BATCH_CHARACTERS):
            token_ids = tokenizer.encode_documents([document.text for document in batch])
            for document, document_ids in zip(batch, token_ids, strict=True):
                writers[document.part].add(document_ids)
    if len(report.left_out) <= job.max_bad_records:
        report.checksums = job.checksums(number)
        with written_aside(job.report_path(number), sync=False) as file:
            file.write(json.dumps(asdict(report)).encode())
    return report


def documents_of(
    piece: CorpusPiece, text_key: str, split: Split, report: PieceReport, max_bad_records: int = sys.maxsize
) -> Iterator[DocumentInPart]:
    """Yield the documents of a piece, and stop at one bad record too many. The report counts documents, empty ones and
    bad records.
    """
    for planned, record in read_piece(piece, text_key):
        if isinstance(record, BadRecord):
            report.left_out.append(line_of(planned, record))
            if len(report.left_out) > max_bad_records:
                return
        elif not record.text:
            report.num_empty += 1
        else:
            document = split.place(planned.file, record.text)
            number = report.num_documents[document.part]
            if document.part == "train" and split.valid_fraction:  # without validation none moves to valid
                if report.least_draw is None or document.draw < report.least_draw:
                    report.least_draw, report.drew_least = document.draw, []
                if document.draw == report.least_draw:
                    report.drew_least.append([number, document.num_bytes])
            report.num_bytes[document.part] += document.num_bytes
            report.num_documents[document.part] = number + 1
            yield document


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def merge_pieces(
    job: EncodingJob, reports: Sequence[PieceReport], folder: Path, vocab_size: int
) -> dict[str, dict[str, int]]:
    """Write train and valid. Return the number of documents, tokens and bytes of text of each.

    Raises: ValueError if no document would be left to train on.
    """
    moved = _moved(job, reports)
    num_train = sum(report.num_documents["train"] for report in reports)
    if num_train == sum(map(len, moved.values())):
        num_documents = num_train + sum(report.num_documents["valid"] for report in reports)
        raise ValueError(
            f"--valid-fraction {job.split.valid_fraction} leaves none of {num_documents} document(s) to train on; a "
            ".txt file is one: split it into a new folder (split -n l/20 --additional-suffix=.txt FILE parts/)"
        )
    counts = {}
    for part in PARTS if job.split.valid_fraction else PARTS[:1]:
        with TokenFileWriter(folder / part, vocab_size) as writer:
            for number, report in enumerate(reports):
                for source, start, stop in _ranges(part, report.num_documents, moved.get(number, [])):
                    writer.copy(job.prefix(number, source), start, stop)
        num_bytes = sum(report.num_bytes[part] for report in reports)
        moved_bytes = sum(size for documents in moved.values() for _, size in documents)
        num_bytes += moved_bytes if part == "valid" else -moved_bytes
        counts[part] = {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens, "num_bytes": num_bytes}
    return counts


def _moved(job: EncodingJob, reports: Sequence[PieceReport]) -> Moved:
    """Return the documents that move to valid because no document qualifies, as in a small corpus: the one with the
    least draw, and all that are equal to it.
    """
    if not job.split.valid_fraction or any(report.num_documents["valid"] for report in reports):
        return {}
    least = min((report.least_draw for report in reports if report.least_draw is not None), default=-1)
    return {number: report.drew_least for number, report in enumerate(reports) if report.least_draw == least}


def _ranges(part: str, num_documents: Mapping[str, int], moved: Sequence[list[int]]) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges of documents that a piece gives to a part: the part in which the piece has them, start, stop."""
    numbers = [number for number, _ in moved]
    if part == "valid":
        yield part, 0, num_documents[part]
        yield from (("train", number, number + 1) for number in numbers)
    else:
        borders = [-1, *numbers, num_documents[part]]
        yield from ((part, before + 1, stop) for before, stop in pairwise(borders))
