"""What a run leaves behind, and that it never overwrites what another one left."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megamix.checkpoint.folder import CHECKPOINTS, checkpoints, set_aside
from megamix.config import Config, ConfigError, config_to_toml, load_config
from megamix.data.durable import sync_directory, sync_file, write_synced

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, SAMPLE, GAVE_UP = "config.toml", "weights.safetensors", "sample.txt", "gave_up.txt"
BEGIN_ANEW = "write another checkpoint.folder to begin anew, or bring a whole one there"
_MARKS = (CONFIG, WEIGHTS, "metrics.jsonl")  # a folder that holds one of these belongs to a run


def checkpoint_folder(config: Config) -> Path:
    return Path(config.checkpoint.folder) / CHECKPOINTS


def folder_problems(config: Config) -> list[str]:
    """Why a run cannot write to its folder, one line each."""
    folder, path = config.checkpoint.folder, Path(config.checkpoint.folder)
    if config.checkpoint.resume != "never":
        if checkpoints(path / CHECKPOINTS):
            return []
        if set_aside(path / CHECKPOINTS):
            return [f"checkpoint.folder: all checkpoints in {folder} are damaged and set aside; {BEGIN_ANEW}"]
        if _ended_before_its_first_save(path, config):
            return []
    held = [name for name in _MARKS if (path / name).exists()]
    if held:
        return [
            f"checkpoint.folder: {folder} holds another run ({', '.join(held)}); write another folder or move that one"
        ]
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return [
            f"checkpoint.folder: {folder} cannot be made, {existing} is no folder to write to; write another folder"
        ]
    return []


def _ended_before_its_first_save(path: Path, config: Config) -> bool:
    """Whether the folder holds this very run, and nothing that a new start would lose."""
    try:
        held = load_config(path / CONFIG)
    except ConfigError:
        return False
    same = all(getattr(held, name) == getattr(config, name) for name in ("model", "data", "optimizer", "training"))
    return same and not (path / WEIGHTS).exists()


def claim(config: Config) -> Path:
    """Make the run's folder and write the effective configuration into it."""
    folder = Path(config.checkpoint.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, config_to_toml(config))
    return folder


def write_text(path: Path, text: str) -> None:
    """Write aside, flush to disk and rename: the file is whole or not there."""
    aside = path.with_suffix(path.suffix + ".partial")
    write_synced(aside, text)
    aside.rename(path)
    sync_directory(path.parent)


def write_weights(path: Path, weights: "dict[str, Tensor]") -> None:
    """FP32 weights as safetensors, each tensor once under its first name; whole or not there."""
    from safetensors.torch import save_file

    once: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in weights.items():
        once.setdefault(id(tensor), (name, tensor))
    aside = path.with_suffix(path.suffix + ".partial")
    save_file(dict(once.values()), aside)
    with aside.open("rb") as file:
        sync_file(file)
    aside.rename(path)
    sync_directory(path.parent)
