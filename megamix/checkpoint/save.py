"""The commit: a fresh folder, a file from each rank, the manifest, and a rename that makes the folder a checkpoint.

`Saver` saves at once, or beside training: it copies the state to the host's memory, and a thread writes that copy. Old
checkpoints are always removed beside training, because nothing waits for their removal.

The writer is a thread, which is enough: everything slow (write, fsync, crc32, the copy from the device) runs without
the interpreter's lock. A process would need the copy in shared memory, a group of ranks of its own, and care for its
start and its end.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megamix.base.durable import aside_name
from megamix.checkpoint.all_or_none import AllOrNone, SomeRankFailed
from megamix.checkpoint.folder import MANIFEST, Files, checkpoints, name_for, unfinished
from megamix.checkpoint.manifest import FileRecord, Manifest, RunRecord, manifest_text
from megamix.checkpoint.mirror import Mirror
from megamix.checkpoint.snapshot import HostCopy, Snapshot, take_snapshot
from megamix.checkpoint.tensor_file import chunks
from megamix.mixed_precision.engine import ShardedEngine

log = logging.getLogger("megamix")

Stays = Callable[[Path], bool]  # returns whether an old checkpoint stays


def save(folder: Path, snapshot: Snapshot, all_or_none: AllOrNone, files: Files | None = None) -> Path:
    """Write a checkpoint, and return its path when it is on the disk. Every rank must call it, and gets the same path.

    It first removes what killed saves have left. Older checkpoints stay; `remove_old` removes them.
    Raises: SomeRankFailed on every rank if anything fails on one. The unfinished folder is removed, and the older
    checkpoints are unchanged.
    """
    files = files or Files()
    updates = snapshot.manifest.applied_updates
    begun = folder / all_or_none.first(lambda: begin(folder, updates, snapshot.largest_size, files))
    try:
        written = all_or_none.every(lambda: write_rank(begun, all_or_none.rank, chunks(snapshot.parts), files))
        saved: Path = folder / all_or_none.first(lambda: commit(begun, snapshot.manifest, written, files))
    except SomeRankFailed:
        if all_or_none.rank == 0:
            with contextlib.suppress(OSError):  # the disk may be gone; the next save tries again
                files.remove_tree(begun)
        raise
    return saved


def begin(folder: Path, applied_updates: int, need: int, files: Files) -> str:
    """Make a fresh folder for the files, which need at most so many bytes, and return its name. Remove what killed
    saves have left. Raises: OSError, also if there is too little disk space.
    """
    if not folder.is_dir():
        files.make_directory(folder)
        files.sync_directory(folder.parent)
    for path in unfinished(folder):
        files.remove_tree(path)
    if need > (free := files.free_space(folder)):
        raise OSError(f"{folder}: a checkpoint takes {need / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free")
    name = aside_name(f"step_{applied_updates:08d}")
    files.make_directory(folder / name)
    return name


def write_rank(begun: Path, rank: int, chunks: Iterable[memoryview], files: Files) -> dict[str, str | int]:
    """Write one rank's file, and return the fields of its FileRecord."""
    name = f"rank_{rank:05d}.safetensors"
    size, crc32 = files.write_file(begun / name, chunks)
    return {"name": name, "size": size, "crc32": crc32}


def commit(begun: Path, manifest: Manifest, written: Sequence[dict[str, str | int]], files: Files) -> str:
    """Make the files in `begun` a checkpoint, and return its name. Raises: OSError."""
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


def remove_old(folder: Path, keep: int, saved: Path | None, files: Files, stays: Stays = lambda path: False) -> None:
    """Remove all checkpoints but the `keep` newest, `saved` and those that stay. A failure loses nothing, so it is only
    logged. One rank calls it, between two saves. The disk may take long to free the files, so it
    runs beside other work.
    """
    try:
        for path in checkpoints(folder)[keep:]:
            if path != saved and not path.is_symlink() and not stays(path):  # a link frees nothing here
                # A half-removed checkpoint must not look whole. So it first loses its name, in one instant, and then
                # its manifest.
                doomed = path.with_name(aside_name(path.name))
                files.rename(path, doomed)
                files.remove_tree(doomed / MANIFEST)
                files.remove_tree(doomed)
    except OSError as error:
        log.warning("an old checkpoint could not be removed: %s", error)


class Saver:
    """Saves an engine's states into one folder. All ranks must make every call, in the same order.

    `all_or_none`: nothing else may use its group, or the thread's collectives would be matched with others.
    `saved(path)`, `failed(error)`: one of them is called at the end of each save, by the thread that wrote it, before
    the next save begins. If a disk fails, every rank gets the same error; if a peer died, each rank gets its own error.
    After a save all checkpoints are removed but the `keep` newest and those of which `stays(path)` is true. `copy`:
    copies the state for a save beside training; None: into memory of its own.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        all_or_none: AllOrNone,
        saved: Callable[[Path], None],
        failed: Callable[[Exception], None],
        files: Files | None = None,
        stays: Stays = lambda path: False,
        frozen: bool = True,
        copy: HostCopy | Mirror | None = None,
    ):
        if type(keep) is not int or keep < 2:
            raise ValueError(f"keep must be a whole number, at least 2, got {keep!r}: the newest may be damaged")
        self.folder, self._keep, self._all_or_none, self._files = folder, keep, all_or_none, files or Files()
        self._saved, self._failed, self._stays, self._frozen = saved, failed, stays, frozen
        self._copy = copy or HostCopy()
        self._thread: threading.Thread | None = None

    def save(self, engine: ShardedEngine, run: RunRecord) -> None:
        """Save the state as it is now, between two steps. Return when the save has ended."""
        self.finish()
        saved = self._write(take_snapshot(engine, run, self._frozen))
        self._begin(lambda: self._remove_old(saved))

    def start(self, engine: ShardedEngine, run: RunRecord) -> None:
        """Save the state beside training: return as soon as it is copied. If an earlier save is still under way, wait
        for its end first.
        """
        self.finish()
        snapshot = self._copy.start(take_snapshot(engine, run, self._frozen))
        self._begin(lambda: self._remove_old(self._write(snapshot)))

    def finish(self) -> None:
        """Wait until no save is under way and the checkpoints that it replaced are removed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, work: Callable[[], None]) -> None:
        # The thread is a daemon, so a run that fails does not wait for it. Its save ends as if it were killed.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _remove_old(self, saved: Path | None) -> None:
        if saved is not None and self._all_or_none.rank == 0:
            remove_old(self.folder, self._keep, saved, self._files, self._stays)

    def _write(self, snapshot: Snapshot) -> Path | None:
        """Write the snapshot, and return the checkpoint's path; None if the save failed."""
        try:
            with self._copy.read():
                leads = self._all_or_none.rank == 0 and self.folder.is_dir()
                if leads and snapshot.largest_size > self._files.free_space(self.folder):  # an earlier keep was larger
                    remove_old(self.folder, self._keep, None, self._files, self._stays)
                path = save(self.folder, snapshot, self._all_or_none, self._files)
        except Exception as error:  # otherwise the error would end in this thread, unseen
            self._failed(error)
            return None
        self._saved(path)
        return path
