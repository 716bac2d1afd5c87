"""Finished pieces joined, in order, to the files that training reads."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megamix.data.prepare.piece import PARTS, Job, PieceReport
from megamix.data.token_file import TokenFileWriter

Moved = tuple[int, int, int]  # piece, document of its train part, bytes


def merge_pieces(job: Job, reports: Sequence[PieceReport], folder: Path, vocab_size: int) -> dict[str, dict[str, int]]:
    """Write train and valid; return the number of documents, tokens and bytes of text of each.

    Raises: ValueError if nothing would be left to train on.
    """
    moved = _moved(job, reports)
    num_train = sum(report.num_documents["train"] for report in reports)
    if num_train == (moved is not None):
        num_documents = num_train + sum(report.num_documents["valid"] for report in reports)
        raise ValueError(
            f"--valid-fraction {job.split.valid_fraction} takes all {num_documents} documents, none is left to train "
            "on; lower it (0 for no validation) or give more files"
        )
    counts = {}
    for part in PARTS if job.split.valid_fraction else PARTS[:1]:
        with TokenFileWriter(folder / part, vocab_size) as writer:
            for number, report in enumerate(reports):
                for source, start, stop in _ranges(part, number, report.num_documents, moved):
                    writer.copy(job.prefix(number, source), start, stop)
        num_bytes = sum(report.num_bytes[part] for report in reports)
        if moved is not None:
            num_bytes += moved[2] if part == "valid" else -moved[2]
        counts[part] = {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens, "num_bytes": num_bytes}
    return counts


def _moved(job: Job, reports: Sequence[PieceReport]) -> Moved | None:
    """The document that validates although it does not qualify, because of a handful of documents none does."""
    if not job.split.valid_fraction or any(report.num_documents["valid"] for report in reports):
        return None
    draws = [
        (report.lowest_draw[0], number, report.lowest_draw[1], report.lowest_draw[2])
        for number, report in enumerate(reports)
        if report.lowest_draw is not None
    ]
    return min(draws)[1:] if draws else None


def _ranges(
    part: str, number: int, num_documents: Mapping[str, int], moved: Moved | None
) -> Iterator[tuple[str, int, int]]:
    """What a piece gives to a part: from which of its parts, and the documents from start to stop."""
    count = num_documents[part]
    if moved is None or moved[0] != number:
        yield part, 0, count
    elif part == "train":
        yield part, 0, moved[1]
        yield part, moved[1] + 1, count
    else:
        yield "train", moved[1], moved[1] + 1
