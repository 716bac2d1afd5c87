"""The commit: a fresh folder, a file from each rank, the manifest, and a rename that makes it a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from megamix.checkpoint import tensor_file
from megamix.checkpoint.files import Files
from megamix.checkpoint.folder import MANIFEST, checkpoints, name_for, unfinished, unfinished_name
from megamix.checkpoint.manifest import FileRecord, Manifest, manifest_text
from megamix.checkpoint.parts import Part
from megamix.checkpoint.snapshot import Snapshot
from megamix.checkpoint.together import FailedTogether, Together

log = logging.getLogger("megamix")


def save(folder: Path, snapshot: Snapshot, together: Together, files: Files | None = None) -> Path:
    """Write a checkpoint that is on the disk when this returns. Every rank must call it; one path for all.

    What killed saves left over is removed; older checkpoints stay, for `remove_old`.
    Raises: FailedTogether on every rank if anything fails on one; what was begun is removed, the older checkpoints
    are as they were.
    """
    files = files or Files()
    begun = folder / together.first(lambda: begin(folder, snapshot, files))
    try:
        written = together.every(lambda: write_parts(begun, together.rank, snapshot.parts, files))
        saved: Path = folder / together.first(lambda: commit(begun, snapshot.manifest, written, files))
    except FailedTogether:
        if together.rank == 0:
            with contextlib.suppress(OSError):  # the disk may be gone; the next save tries again
                files.remove_tree(begun)
        raise
    return saved


def begin(folder: Path, snapshot: Snapshot, files: Files) -> str:
    """The name of a fresh folder for the files. Raises: OSError, also where there is too little space."""
    if not folder.is_dir():
        files.make_directory(folder)
        files.sync_directory(folder.parent)
    for path in unfinished(folder):
        files.remove_tree(path)
    need, free = snapshot.largest_size, files.free_space(folder)
    if need > free:
        raise OSError(f"{folder}: a checkpoint takes {need / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free")
    name = unfinished_name(f"step_{snapshot.manifest.applied_updates:08d}")
    files.make_directory(folder / name)
    return name


def write_parts(begun: Path, rank: int, parts: Sequence[Part], files: Files) -> dict[str, str | int]:
    """Write one rank's file: a FileRecord's fields."""
    name = f"rank_{rank:05d}.safetensors"
    size, crc32 = files.write_file(begun / name, tensor_file.chunks(parts))
    return {"name": name, "size": size, "crc32": crc32}


def commit(begun: Path, manifest: Manifest, written: Sequence[dict[str, str | int]], files: Files) -> str:
    """The name of the checkpoint that the files in `begun` are from now on."""
    records = tuple(FileRecord.model_validate(fields) for fields in written)
    for record in records:
        path = begun / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            raise OSError(f"{path} is not as its rank wrote it; use a folder on a disk that all ranks share")
    text = manifest_text(manifest.model_copy(update={"files": records}))
    files.write_file(begun / MANIFEST, [memoryview(text)])
    files.sync_directory(begun)
    name = name_for(begun.parent, manifest.applied_updates)
    files.rename(begun, begun.parent / name)
    files.sync_directory(begun.parent)
    return name


def remove_old(folder: Path, keep: int, saved: Path, files: Files) -> None:
    """Keep the newest, whatever becomes of the rest: a failure here loses nothing, so it is only told. One rank calls
    it, after a save and before the next one, beside whatever else: it takes as long as the disk needs to free them.
    """
    try:
        for path in checkpoints(folder)[keep:]:
            if path != saved:
                # First it loses its name, in one instant, and then its manifest: it must not be taken for whole.
                doomed = path.with_name(unfinished_name(path.name))
                files.rename(path, doomed)
                files.remove_tree(doomed / MANIFEST)
                files.remove_tree(doomed)
    except OSError as error:
        log.warning("an old checkpoint could not be removed: %s", error)
