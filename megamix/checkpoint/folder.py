"""What lies in a folder of checkpoints: the names tell it, and a rename changes it at once."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder's name in a run's folder
MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_UNFINISHED = ".partial-"  # being written or removed; the next save removes what is left of it
_DAMAGED = ".damaged-"  # set aside; for people to look at, never removed


def checkpoints(folder: Path) -> list[Path]:
    """Those that were committed, the newest first."""
    numbers = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _COMPLETE.fullmatch(path.name):
            numbers[path] = (int(match[1]), int(match[2] or 0))
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


def unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _UNFINISHED in path.name)


def set_aside(folder: Path) -> list[Path]:
    """Those that were found damaged."""
    return sorted(path for path in folder.iterdir() if _DAMAGED in path.name) if folder.is_dir() else []


def applied_updates(checkpoint: Path) -> int:
    """As the name has it."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def name_for(folder: Path, applied_updates: int) -> str:
    """A name behind all others of the same update: two saves after it may differ, in what is to be tried again."""
    name = f"step_{applied_updates:08d}"
    for path in checkpoints(folder):
        if (match := _COMPLETE.fullmatch(path.name)) and int(match[1]) == applied_updates:
            return f"{name}.{int(match[2] or 0) + 1}"  # the newest of them comes first
    return name


def unfinished_name(name: str) -> str:
    # Never the same twice: written into a folder that an earlier attempt left, the files of two steps would mix.
    return name + _UNFINISHED + secrets.token_hex(4)


def damaged_name(name: str) -> str:
    return name + _DAMAGED + secrets.token_hex(4)
