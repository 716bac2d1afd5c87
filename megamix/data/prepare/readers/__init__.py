"""Files of records, one reader for each kind; `reader_of(kind)` is the way in.

A reader is a module with two functions:
  cut(path, blocks, piece_bytes) -> stretches of the file that can be read on their own, in order
  read(path, stretch, text_key)  -> its records, each a Document or a BadRecord, in order; never the whole file
What is wrong with one record is a BadRecord, what is wrong with the request a ValueError.
"""

from importlib import import_module
from typing import Protocol, cast

from megamix.data.prepare.readers.record import Blocks, Records, Stretch

__all__ = ["KINDS", "Reader", "kind_of", "reader_of"]

# The first ending that fits; everything else is text, one document a file.
KINDS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json.gz": "jsonl",
    ".json.zst": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


class Reader(Protocol):
    def cut(self, path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]: ...

    def read(self, path: str, stretch: Stretch, text_key: str) -> Records: ...


def kind_of(name: str) -> str:
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "text")


def reader_of(kind: str) -> Reader:
    return cast(Reader, import_module(f"megamix.data.prepare.readers.{kind}"))
