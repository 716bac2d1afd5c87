"""A copy of a finished checkpoint on another file system: whole or not there, each byte compared with the manifest."""

import contextlib
import os
from pathlib import Path

from megamix.checkpoint.folder import MANIFEST, Files, applied_updates, checkpoints, name_for
from megamix.checkpoint.manifest import DamagedCheckpoint, check_size, read_manifest
from megamix.checkpoint.save import begin
from megamix.checkpoint.tensor_file import verified_chunks
from megamix.checkpoint.verify import verify_checkpoint


def copy_checkpoint(source: Path, folder: Path, files: Files | None = None) -> Path:
    """Copy a checkpoint into a folder of checkpoints, and return its path there when it is on the disk. If the folder
    has it already, nothing is written; else what killed copies have left is removed first. The caller holds the folder.

    Nothing there is replaced: beside another checkpoint of the same name the copy gets the next name of its update.
    Raises: ValueError if the source is damaged; OSError, also if the copy does not read back as the source.
    """
    files = files or Files()
    manifest, text = read_manifest(source / MANIFEST), (source / MANIFEST).read_bytes()
    for record in manifest.files:
        check_size(source / record.name, record)
    for path in checkpoints(folder):
        if applied_updates(path) == manifest.applied_updates and (path / MANIFEST).read_bytes() == text:
            return path
    need = sum(record.size for record in manifest.files) + len(text)
    begun = folder / begin(folder, manifest.applied_updates, need, files)
    try:
        for record in manifest.files:
            files.write_file(begun / record.name, verified_chunks(source / record.name, record))
        files.write_file(begun / MANIFEST, [memoryview(text)])
        files.sync_directory(begun)
        try:
            verify_checkpoint(begun)
        except DamagedCheckpoint as error:  # of the copy: the source is good, so another try may succeed
            raise OSError(f"the copy is not what was written: {error}") from None
        taken = os.path.lexists(folder / source.name)
        name = name_for(folder, manifest.applied_updates) if taken else source.name
        files.rename(begun, folder / name)
        files.sync_directory(folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the disk may be gone; the next copy tries again
            files.remove_tree(begun)
        raise
    return folder / name
