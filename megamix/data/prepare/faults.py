"""Files of which nothing can be read, as far as their first bytes or their footer tell."""

import re
from pathlib import Path

from megamix.data.prepare.compressed import GZIP, GZIP_MAGIC, ZSTD, ZSTD_MAGIC, is_named, is_skippable
from megamix.data.prepare.tables import table_fault
from megamix.plugins import FILE_KINDS

_HEAD = 512  # bytes, more than a pointer has
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*size (\d+)")
_UNREAD = (".bz2", ".xz", ".lz4")


def fault_of(path: str, kind: str) -> tuple[str, int]:
    """Return why nothing of a file can be read, with the fix, and the bytes that are lost if these are not its own:
    those of the file for which a Git LFS pointer stands. ("", 0): something may be read.
    """
    with Path(path).open("rb") as file:
        head = file.read(_HEAD)
    if pointer := _POINTER.match(head):
        return "a Git LFS pointer in place of the file; run `git lfs pull` in its folder", int(pointer[1])
    if kind in ("parquet", "arrow"):
        return table_fault(path, kind), 0
    if path.lower().endswith(_UNREAD) and Path(path).stem.lower().endswith((*FILE_KINDS, ".txt")):
        return f"compressed as {Path(path).suffix}, which is not read; compress it by gzip or zstd", 0
    named = "gzip" if is_named(path, GZIP) else "Zstandard" if is_named(path, ZSTD) else "nothing"
    by = "gzip" if head.startswith(GZIP_MAGIC) else "nothing"
    if head.startswith(ZSTD_MAGIC) or is_skippable(head):
        by = "Zstandard"
    is_text = kind == "text" and named == "nothing"  # whatever it is, no name promises more
    if head and named != by and kind in ("text", "json", "jsonl") and not is_text:
        return f"compressed by {by}, though its name says by {named}; give it the ending of what it is", 0
    return "", 0
