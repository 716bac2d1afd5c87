"""What a rename may rely on: bytes and names that have reached the disk."""

import os
from pathlib import Path
from typing import IO, Any


def sync_file(handle: IO[Any]) -> None:
    """Push an open file's bytes to the disk; without it a rename can survive a power cut that the bytes did not."""
    handle.flush()
    os.fsync(handle.fileno())


def sync_directory(path: Path) -> None:
    """Push a directory's entries to the disk; without it a finished rename can be undone by a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Add a line that is on the disk when this returns."""
    with path.open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")
        sync_file(handle)


def cut_lines(path: Path, size: int) -> None:
    """Drop what lies behind `size` bytes of a file of lines, and a line before that which a crash left unfinished."""
    if not path.exists():
        return
    with path.open("r+b") as handle:
        kept = handle.read(size)
        handle.truncate(kept.rfind(b"\n") + 1)
        sync_file(handle)


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as handle:
        handle.write(text)
        sync_file(handle)
