"""The commit: a fresh folder, a file from each rank, the manifest, and a rename that makes it a checkpoint.

`Saver` does it at once, or while training goes on: a copy in the host's memory, written by a thread. What is no longer
kept is removed beside training in any case, for nothing waits for it.

A thread and not a process: all that takes long (write, fsync, crc32, the copy from the device) runs without the
interpreter's lock, and a process would need the copy in shared memory, a start of its own, ranks of its own, and an
end of its own when this one is killed.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megamix.checkpoint.folder import MANIFEST, Files, checkpoints, name_for, unfinished
from megamix.checkpoint.manifest import FileRecord, Manifest, RunRecord, manifest_text
from megamix.checkpoint.snapshot import HostCopy, Snapshot, take_snapshot
from megamix.checkpoint.tensor_file import chunks
from megamix.checkpoint.together import FailedTogether, Together
from megamix.durable import aside_name
from megamix.mixed_precision.engine import ShardedEngine

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
        written = together.every(lambda: write_rank(begun, together.rank, chunks(snapshot.parts), files))
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
    name = aside_name(f"step_{snapshot.manifest.applied_updates:08d}")
    files.make_directory(folder / name)
    return name


def write_rank(begun: Path, rank: int, chunks: Iterable[memoryview], files: Files) -> dict[str, str | int]:
    """Write one rank's file, and return a FileRecord's fields."""
    name = f"rank_{rank:05d}.safetensors"
    size, crc32 = files.write_file(begun / name, chunks)
    return {"name": name, "size": size, "crc32": crc32}


def commit(begun: Path, manifest: Manifest, written: Sequence[dict[str, str | int]], files: Files) -> str:
    """Return the name of the checkpoint that the files in `begun` are from now on."""
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
                doomed = path.with_name(aside_name(path.name))
                files.rename(path, doomed)
                files.remove_tree(doomed / MANIFEST)
                files.remove_tree(doomed)
    except OSError as error:
        log.warning("an old checkpoint could not be removed: %s", error)


class Saver:
    """Saves an engine's states into one folder. Every call must be made by all ranks, in the same order.

    `together`: over a group that nobody else uses, for the thread's collectives would be matched with others'.
    `saved(path)`, `failed(error)`: how each save ended, called by whichever thread wrote it, before the next one
    begins. An error of the disk is the same one on every rank; if a peer died, each has its own.
    After a save all but the `keep` newest are removed.
    """

    def __init__(
        self, folder: Path, keep: int, together: Together,
        saved: Callable[[Path], None], failed: Callable[[Exception], None], files: Files | None = None,
    ):  # fmt: skip
        if type(keep) is not int or keep < 2:
            raise ValueError(f"keep must be a whole number, at least 2, got {keep!r}; the newest may be damaged")
        self.folder, self._keep, self._together, self._files = folder, keep, together, files or Files()
        self._saved, self._failed = saved, failed
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None

    def save(self, engine: ShardedEngine, run: RunRecord) -> None:
        """Save the state as it is now, between two steps, and return when that has ended."""
        self.finish()
        saved = self._write(take_snapshot(engine, run))
        self._begin(lambda: self._remove_old(saved))

    def start(self, engine: ShardedEngine, run: RunRecord) -> None:
        """Save it beside training: return as soon as the state is copied. Waits for the save before it, if that is
        still under way.
        """
        self.finish()
        snapshot = self._copy.take(take_snapshot(engine, run))
        self._begin(lambda: self._remove_old(self._write(snapshot)))

    def finish(self) -> None:
        """Return when no save is under way, and what it has replaced is gone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, work: Callable[[], None]) -> None:
        # A daemon, for a run that fails does not wait for it: to a save, that is a kill like any other.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _remove_old(self, saved: Path | None) -> None:
        if saved is not None and self._together.rank == 0:
            remove_old(self.folder, self._keep, saved, self._files)

    def _write(self, snapshot: Snapshot) -> Path | None:
        """The checkpoint; None if there is none."""
        try:
            self._copy.wait()
            path = save(self.folder, snapshot, self._together, self._files)
        except Exception as error:  # in a thread, nobody else would learn of it
            self._failed(error)
            return None
        self._saved(path)
        return path
