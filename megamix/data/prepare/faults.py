"""Files of which nothing can be read, as far as their name, their first bytes or their footer tell."""

from pathlib import Path

from megamix.base.git_lfs import pointed_bytes
from megamix.data.prepare.compressed import DAMAGE, is_named, open_plain
from megamix.data.prepare.tables import table_fault
from megamix.plugins import COMPRESSIONS, FILE_KINDS, READERS

_CSV = tuple(ending + more for ending in (".csv", ".tsv") for more in ("", *COMPRESSIONS))
_NO_CSV = (
    "comma-separated values, which are not read; save them as JSON Lines (pandas: read_csv(...).to_json('x.jsonl', "
    "orient='records', lines=True)) and name the column of the text by --text-key"
)
_UNREAD = (".bz2", ".xz", ".lz4")


def fault_of(path: str, kind: str) -> tuple[str, int]:
    """Return why nothing of a file can be read, with the fix, and the bytes that are lost if these are not its own:
    those of the file for which a Git LFS pointer stands. ("", 0): something may be read.
    """
    if (size := pointed_bytes(Path(path))) is not None:
        return "a Git LFS pointer in place of the file; run `git lfs pull` in its folder", size
    if kind in READERS.registered:
        return "", 0
    if kind in ("parquet", "arrow"):
        return table_fault(path, kind), 0
    if is_named(path, _CSV):
        return _NO_CSV, 0
    if is_named(path, _UNREAD) and is_named(Path(path).stem, (*FILE_KINDS, ".txt")):
        return f"compressed as {Path(path).suffix}, which is not read; compress it by gzip or zstd", 0
    try:
        with open_plain(path) as plain:
            plain.read(1)
    except DAMAGE as error:
        return f"not compressed as its name says: {error}", 0
    return "", 0
