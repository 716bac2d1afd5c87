"""The newest good checkpoint, and its way into an engine with any number of ranks, bucket size and groups."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.files import Files
from megamix.checkpoint.folder import checkpoints, damaged_name
from megamix.checkpoint.manifest import Manifest
from megamix.checkpoint.parts import Part, owned_parts, state_names
from megamix.checkpoint.tensor_file import read_into
from megamix.checkpoint.together import Together
from megamix.checkpoint.verify import Checkpoint, Damaged, Stored, read_checkpoint
from megamix.mixed_precision.engine import ShardedEngine

log = logging.getLogger("megamix")


def read_together(path: Path, together: Together) -> Checkpoint:
    """Check a checkpoint, its bytes by all ranks in shares. Every rank must call it.

    Raises: Damaged on every rank, with what any of them found.
    """
    checkpoint, problems = None, []
    try:
        checkpoint = read_checkpoint(path, together.rank, together.size)
    except Damaged as error:
        problems = error.problems
    found = dict.fromkeys(line for lines in together.every(lambda: problems) for line in lines)
    if found:
        raise Damaged(list(found))
    assert checkpoint is not None
    return checkpoint


def newest_checkpoint(folder: Path, together: Together, files: Files | None = None) -> Checkpoint | None:
    """The newest that is good. Those before it are set aside, with one line each. Every rank must call it."""
    files = files or Files()
    rejected: set[str] = set()
    while name := together.first(lambda: _newest_name(folder, rejected)):
        try:
            return read_together(folder / name, together)
        except Damaged as error:
            rejected.add(name)  # set aside or not: the disk may be read-only
            if together.rank == 0:
                _set_aside(folder / name, error, files)
    return None


def _newest_name(folder: Path, rejected: set[str]) -> str | None:
    return next((path.name for path in checkpoints(folder) if path.name not in rejected), None)


def _set_aside(path: Path, reason: Damaged, files: Files) -> None:
    target = path.with_name(damaged_name(path.name))
    try:
        files.rename(path, target)
        log.warning("checkpoint refused and set aside as %s: %s", target.name, reason)
    except OSError as error:
        log.warning("checkpoint refused: %s (and not set aside: %s)", reason, error)


def load(checkpoint: Checkpoint, engine: ShardedEngine, together: Together) -> None:
    """Set masters, optimizer states, counters, loss scale and half parameters. Every rank must call it.

    Raises: ValueError naming everything that does not fit the engine, before anything is changed; FailedTogether on
    every rank if one cannot read, after which the engine holds some of each.
    """
    manifest = checkpoint.manifest
    if problems := misfits(manifest, engine):
        raise ValueError(f"{checkpoint.path} does not fit this model: " + "; ".join(problems))
    together.every(lambda: read_parts(checkpoint, owned_parts(engine)))
    engine.applied_updates.fill_(manifest.applied_updates)
    engine.skipped_steps.fill_(manifest.skipped_steps)
    _load_scale(manifest, engine)
    engine.publish_masters()


def misfits(manifest: Manifest, engine: ShardedEngine) -> list[str]:
    """Why this checkpoint cannot become the engine's state; empty if it can."""
    saved = {param.name: param.shape for param in manifest.params}
    own = {slot.spec.name: slot.spec.full_shape for bucket in engine.layout.buckets for slot in bucket.slots}
    problems = [f"missing {name}" for name in own if name not in saved]
    problems += [f"unknown {name}" for name in saved if name not in own]
    problems += [
        f"{name} has shape {saved[name]}, the model's has {shape}"
        for name, shape in own.items()
        if name in saved and saved[name] != shape
    ]
    if manifest.states != state_names(engine):
        problems.append(f"it holds {', '.join(manifest.states)}, the optimizer needs {', '.join(state_names(engine))}")
    return problems


def _load_scale(manifest: Manifest, engine: ShardedEngine) -> None:
    saved = {name: torch.tensor(value, dtype=torch.float64) for name, value in manifest.loss_scale.items()}
    own = engine.loss_scale.state_dict()
    if {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in own.items()}:
        engine.loss_scale.load_state_dict(saved)
    else:  # another rule, as where a run that gave up goes on in BF16
        log.warning("the checkpoint's loss scale has another rule (%s): it begins anew", ", ".join(saved) or "none")


def read_parts(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    """Fill the parts' memory, reading of each file only what lies in them."""
    wanted: dict[str, list[tuple[Stored, Part, Box]]] = defaultdict(list)
    for part in parts:
        for stored in checkpoint.stored[part.param, part.state]:
            if common := part.box.intersection(stored.box):
                wanted[stored.file].append((stored, part, common))
    for name, copies in wanted.items():
        path = checkpoint.path / name
        with safe_open(path, "pt") as tensors, open(path, "rb", buffering=0) as file:
            for stored, part, common in copies:
                if common == stored.box == part.box and part.tensor.is_cpu:  # as where the layout is the same
                    read_into(part.tensor, file, stored.start)
                    continue
                piece = tensors.get_slice(stored.key)[common.slices_in(stored.box)]
                part.tensor.view(part.box.size)[common.slices_in(part.box)].copy_(piece)
