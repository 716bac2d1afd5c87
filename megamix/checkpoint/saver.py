"""Saving while training goes on: a copy in the host's memory, written by a thread. What is no longer kept is removed
beside training in any case, for nothing waits for it.

A thread and not a process: all that takes long (write, fsync, crc32, the copy from the device) runs without the
interpreter's lock, and a process would need the copy in shared memory, a start of its own, ranks of its own, and an
end of its own when this one is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from megamix.checkpoint.files import Files
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import remove_old, save
from megamix.checkpoint.snapshot import HostCopy, Snapshot, take_snapshot
from megamix.checkpoint.together import Together
from megamix.mixed_precision.engine import ShardedEngine

FEWEST_KEPT = 2  # if the newest is found damaged, there is another one


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
        if keep < FEWEST_KEPT:
            raise ValueError(f"keep must be at least {FEWEST_KEPT} checkpoints, got {keep}; the newest may be damaged")
        self.folder, self._keep, self._together, self._files = folder, keep, together, files or Files()
        self._saved, self._failed = saved, failed
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None

    def save(self, engine: ShardedEngine, run: RunRecord) -> None:
        """Save the state as it is now, between two steps, and return when that has ended."""
        self.finish()
        if saved := self._write(take_snapshot(engine, run)):
            self._begin(lambda: self._remove_old(saved))

    def start(self, engine: ShardedEngine, run: RunRecord) -> None:
        """The same beside training: return as soon as the state is copied. Waits for the save before it, if that is
        still under way.
        """
        self.finish()
        snapshot = self._copy.take(take_snapshot(engine, run))
        self._begin(lambda: self._write_and_remove(snapshot))

    def finish(self) -> None:
        """Return when no save is under way, and what it has replaced is gone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, work: Callable[[], None]) -> None:
        # A daemon, for a run that fails does not wait for it: to a save, that is a kill like any other.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_and_remove(self, snapshot: Snapshot) -> None:
        if saved := self._write(snapshot):
            self._remove_old(saved)

    def _remove_old(self, saved: Path) -> None:
        if self._together.rank == 0:
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
