"""A file of text is one document."""

from pathlib import Path

from megamix.data.prepare.readers.record import LONGEST_DOCUMENT, Blocks, Records, Stretch, decoded


def cut(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    size = Path(path).stat().st_size
    return [Stretch(0, size, 0, size)]


def read(path: str, stretch: Stretch, text_key: str) -> Records:
    with Path(path).open("rb") as file:
        yield decoded(0, file.read(LONGEST_DOCUMENT + 1))
