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


def checkpoints(folder: Path, before: str | None = None) -> list[Path]:
    """Those that were committed, the newest first; of them only those before the one of that name, if it is given."""
    paths = [path for path in _folders(folder) if _COMPLETE.fullmatch(path.name)]
    return sorted(
        (path for path in paths if before is None or _number(path.name) < _number(before)),
        key=lambda path: _number(path.name), reverse=True,
    )  # fmt: skip


def unfinished(folder: Path) -> list[Path]:
    return [path for path in _folders(folder) if _UNFINISHED in path.name]


def set_aside(folder: Path) -> list[Path]:
    """Those that were found damaged."""
    return [path for path in _folders(folder) if _DAMAGED in path.name]


def _folders(folder: Path) -> list[Path]:
    """What may be a checkpoint: a file of such a name is somebody else's, and stays."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def name_for(folder: Path, applied_updates: int) -> str:
    """A name behind all others of the same update, whatever bears them: two saves after it may differ, in what is to be
    tried again.
    """
    taken = [_number(path.name) for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    again = max((again for update, again in taken if update == applied_updates), default=-1) + 1
    return f"step_{applied_updates:08d}" + (f".{again}" if again else "")


def _number(name: str) -> tuple[int, int]:
    """The update, and which save after it. The larger, the newer."""
    match = _COMPLETE.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def unfinished_name(name: str) -> str:
    # Never the same twice: written into a folder that an earlier attempt left, the files of two steps would mix.
    return name + _UNFINISHED + secrets.token_hex(4)


def damaged_name(name: str) -> str:
    return name + _DAMAGED + secrets.token_hex(4)
