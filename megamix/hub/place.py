"""A model by its path, and the JSON of its folder. No torch here: a wrong path is answered before that is imported."""

import json
from pathlib import Path
from typing import Any

from megamix.checkpoint.folder import CHECKPOINTS, MANIFEST, checkpoints

CONFIG = "config.json"
# What is parsed before anything of it can be judged, in bytes. Ten times what the largest models that are known here
# have; parsed it takes up to 25 times as much memory.
_LARGEST_JSON = 4 << 20


def find_model(path: Path) -> Path:
    """Return the checkpoint or Hugging Face folder that a path means, the newest one of a run.

    Raises: ValueError naming what is missing.
    """
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
    """Return what a file of a Hugging Face folder holds. Raises: ValueError naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; give a Hugging Face folder (hf download NAME --local-dir DIR)")
    if (size := path.stat().st_size) > _LARGEST_JSON:
        raise ValueError(f"{path} has {size:,} bytes, such a file has at most {_LARGEST_JSON:,}; copy it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; copy it again") from None
    except RecursionError:
        raise ValueError(f"{path} has lists or tables within each other that are too deep to read") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no table")
    return content
