"""Frozen parameters. No checkpoint holds them: its manifest has digests of their values, and a folder may keep the
values once for all of its checkpoints.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import MANIFEST, checkpoints, set_aside
from megamix.checkpoint.manifest import read_manifest
from megamix.checkpoint.snapshot import digest, frozen_digests, frozen_params
from megamix.checkpoint.verify import Checkpoint
from megamix.durable import folder_aside, sync_file
from megamix.mixed_precision.engine import ShardedEngine

log = logging.getLogger("megamix")


def _values_of(folder: Path, digests: Mapping[str, str]) -> Path:
    """Return the path of the file for the values with these digests, whether it exists or not."""
    own_name = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]
    return folder / f"frozen_{own_name}" / "values.safetensors"


def save_frozen(folder: Path, engine: ShardedEngine) -> None:
    """Write the values of the engine's frozen parameters, unless the folder has them already. After writing, remove the
    values that belong to no checkpoint any more. Raises: OSError.
    """
    values = _values_of(folder, frozen_digests(engine))
    if not values.exists():
        folder.mkdir(exist_ok=True)
        with folder_aside(values.parent) as begun:
            params = frozen_params(engine).items()
            save_file(
                {name: param.detach().cpu().clone(memory_format=torch.contiguous_format) for name, param in params},
                begun / values.name,
            )
            with open(begun / values.name, "rb", buffering=0) as file:
                sync_file(file)
        _remove_unneeded(folder)


def _remove_unneeded(folder: Path) -> None:
    needed = set[Path]()
    for path in (*checkpoints(folder), *set_aside(folder)):
        with suppress(ValueError, OSError):  # a checkpoint without a readable manifest cannot be loaded anyway
            needed.add(_values_of(folder, read_manifest(path / MANIFEST).frozen or {}).parent)
    kept = sorted(folder.glob("frozen_*"), key=lambda path: path.stat().st_mtime)
    for path in kept[:-2]:  # the newest belongs to this save, and the one before may belong to a save under way
        if path not in needed:
            shutil.rmtree(path)


def fit_frozen(checkpoint: Checkpoint, engine: ShardedEngine, all_or_none: AllOrNone, *, takes: bool) -> None:
    """Compare the frozen parameters of the first rank's engine with those of the model that was saved. With
    `takes`, set them to the values that the checkpoint's folder keeps. Every rank must call it.

    Raises, on every rank and before anything is changed: ValueError naming the parameters that differ; SomeRankFailed
    if the kept values cannot be read, or are not what was saved.
    """
    saved, own = checkpoint.manifest.frozen, all_or_none.first(lambda: frozen_digests(engine))
    if saved is None or saved == own:
        return
    wanted = {name: text for name, text in saved.items() if own.get(name) != text}
    path, values = _values_of(checkpoint.path.parent, saved), dict[str, Tensor]()
    if takes and saved.keys() == own.keys() and all_or_none.first(path.exists):
        all_or_none.every(lambda: values.update(_read(path, wanted, engine)))
        with torch.no_grad():
            for name in wanted:
                frozen_params(engine)[name].copy_(values[name])
        return
    other_dtype = [name for name, text in wanted.items() if own.get(name, text).split()[0] != text.split()[0]]
    if wrong := [name for name in {**wanted, **own} if saved.get(name) != own.get(name) and name not in other_dtype]:
        raise ValueError(
            f"{checkpoint.path} was saved beside other frozen parameters than the model has, and does not hold them. "
            f"They differ in {', '.join(wrong[:8])}{' and others' if wrong[8:] else ''}. Give the model the same "
            "frozen parameters, or save and load by Checkpoints(..., frozen=True)"
        )
    if all_or_none.rank == 0:
        log.warning("frozen parameters cannot be compared: %s was saved in another dtype", other_dtype[0])


def _read(path: Path, wanted: Mapping[str, str], engine: ShardedEngine) -> dict[str, Tensor]:
    """Return the values of the `wanted` parameters. Raises: ValueError if one has another digest or shape; OSError."""
    values, params = load_file(path), frozen_params(engine)
    for name, text in wanted.items():
        if digest(values[name]) != text or values[name].shape != params[name].shape:
            raise ValueError(f"{path}: {name} is not what was saved, or has another shape in the model")
    return values
