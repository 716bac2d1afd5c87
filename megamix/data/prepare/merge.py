"""Finished pieces joined, in order, to the files that training reads."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from megamix.data.prepare.piece import PARTS, EncodingJob, PieceReport
from megamix.data.token_file import TokenFileWriter

Moved = dict[int, list[list[int]]]  # of each piece the documents of its train part: number and bytes


def merge_pieces(
    job: EncodingJob, reports: Sequence[PieceReport], folder: Path, vocab_size: int
) -> dict[str, dict[str, int]]:
    """Write train and valid; return the number of documents, tokens and bytes of text of each.

    Raises: ValueError if nothing would be left to train on.
    """
    moved = _moved(job, reports)
    num_train = sum(report.num_documents["train"] for report in reports)
    if num_train == sum(map(len, moved.values())):
        num_documents = num_train + sum(report.num_documents["valid"] for report in reports)
        raise ValueError(
            f"--valid-fraction {job.split.valid_fraction} takes all {num_documents} documents, equal ones together, "
            "and none is left to train on; lower it (0 for no validation) or give more files"
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
    """The document that validates although it does not qualify, because of a handful of documents none does; and all
    that are equal to it.
    """
    if not job.split.valid_fraction or any(report.num_documents["valid"] for report in reports):
        return {}
    least = min((report.least_draw for report in reports if report.least_draw is not None), default=-1)
    return {number: report.drew_least for number, report in enumerate(reports) if report.least_draw == least}


def _ranges(part: str, num_documents: Mapping[str, int], moved: Sequence[list[int]]) -> Iterator[tuple[str, int, int]]:
    """What a piece gives to a part: from which of its parts, and the documents from start to stop."""
    numbers = [number for number, _ in moved]
    if part == "valid":
        yield part, 0, num_documents[part]
        yield from (("train", number, number + 1) for number in numbers)
    else:
        borders = [-1, *numbers, num_documents[part]]
        yield from ((part, before + 1, stop) for before, stop in pairwise(borders))
