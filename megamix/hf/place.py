"""A model's folder by its path, and the folder's JSON. This module imports no torch, so a wrong path fails at once."""

from pathlib import Path
from typing import Any

from megamix.checkpoint.folder import CHECKPOINTS, MANIFEST, checkpoints
from megamix.data.json_table import read_table

CONFIG = "config.json"


def find_model(path: Path) -> Path:
    """Return the checkpoint or Hugging Face folder that a path means; for a run its newest checkpoint.

    Raises: ValueError naming what is missing.
    """
    if (path / MANIFEST).is_file() and any(path.glob("*.idx")):
        raise ValueError(f"{path} holds prepared texts, no model; give a run that has trained on them, as runs/mine")
    if is_hugging_face(path) or (path / MANIFEST).is_file():
        return path
    if found := checkpoints(path / CHECKPOINTS) or checkpoints(path):
        return found[0]
    is_there = "holds no model" if path.is_dir() else "is no folder"
    raise ValueError(
        f"{path} {is_there}: none of {CHECKPOINTS}/step_*, {MANIFEST} and {CONFIG} is in it; give a run that has "
        "saved, a checkpoint, or a Hugging Face folder (hf download NAME --local-dir DIR)"
    )


def is_hugging_face(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Return the table of a JSON file that a Hugging Face folder must have. Raises: ValueError naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; give a Hugging Face folder (hf download NAME --local-dir DIR)")
    return read_table(path)
