"""An engine's checkpoints as one object: what a program of one's own needs to save, and to go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load_or_older, newest_checkpoint
from megamix.checkpoint.manifest import DamagedCheckpoint, RunRecord
from megamix.checkpoint.save import Saver
from megamix.checkpoint.together import Together
from megamix.mixed_precision.engine import ShardedEngine


class Checkpoints:
    """Saves an engine's state into a folder and loads the newest. Every rank must make every call, in the same order.

        checkpoints = Checkpoints(engine, "runs/mine")
        progress = checkpoints.load() or {"step": 0}
        ...
        checkpoints.save({"step": 100})

    A checkpoint is of the whole model: it loads on any number of ranks. After a save all but the `keep` newest, at
    least 2, are removed. Units: `timeout_s` bounds the wait for the slowest rank.
    """

    def __init__(self, engine: ShardedEngine, folder: str | Path, keep: int = 2, timeout_s: float = 600.0):
        self._engine, self._folder = engine, Path(folder)
        self._together = Together.apart(engine.topology.world, timeout_s)
        self._saver = Saver(self._folder, keep, self._together, lambda path: None, self._failed)
        self._error: Exception | None = None
        self._together.first(lambda: self._folder.parent.mkdir(parents=True, exist_ok=True))

    def load(self) -> dict[str, JsonValue] | None:
        """Load the newest good checkpoint; return what `save` was given, or None where the folder has no checkpoint.
        Damaged ones are set aside, with one line each in the log.

        Raises: ValueError naming all that does not fit the engine, before anything is changed; DamagedCheckpoint if
        there are checkpoints and none is good.
        """
        self.wait()
        if not self._together.first(lambda: bool(checkpoints(self._folder))):
            return None
        found = newest_checkpoint(self._folder, self._together)
        if found is not None:
            found = load_or_older(found, self._engine, self._together)
        if found is None:
            raise DamagedCheckpoint([f"{self._folder} has no good checkpoint left; give another folder to begin anew"])
        return found.manifest.run.progress

    def save(self, progress: Mapping[str, JsonValue], beside: bool = False) -> None:
        """Save the state between two steps, with the caller's own `progress`.

        `beside`: return as soon as the state is copied, and write it while training goes on.
        Raises: OSError on every rank if this save fails, or one that was under way; the older checkpoints stay.
        """
        self.wait()
        write = self._saver.start if beside else self._saver.save
        write(self._engine, RunRecord(progress=dict(progress)))
        if not beside:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way. Raises: as `save`."""
        self._saver.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _failed(self, error: Exception) -> None:
        self._error = error
