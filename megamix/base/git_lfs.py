"""Pointers of Git LFS, which a clone without `git lfs` holds in place of large files."""

import re
from pathlib import Path

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*size (\d+)")
_HEAD = 512  # bytes, more than a pointer has


def pointed_bytes(path: Path) -> int | None:
    """Return the size of the file for which a pointer stands; None if the file is no pointer. Raises: OSError."""
    with path.open("rb") as file:
        found = _POINTER.match(file.read(_HEAD))
    return int(found[1]) if found else None


def refuse_pointer(path: Path) -> None:
    """Raises: ValueError if a file is a pointer; OSError."""
    if pointed_bytes(path) is not None:
        raise ValueError(f"{path} is a Git LFS pointer, not the file: run git lfs pull there, or hf download")
