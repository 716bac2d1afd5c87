"""What a run saves and what it says of it, and what a checkpoint that cannot be written means."""

from __future__ import annotations

import time
from pathlib import Path

from megamix.checkpoint.saver import Saver
from megamix.config import Config
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.console import Console
from megamix.train.progress import Progress
from megamix.train.resume import Start
from megamix.train.run_folder import checkpoint_folder
from megamix.train.signals import SAVE_FAILED, LeaveRequest
from megamix.train.status import SaveFailedError


class RunCheckpoints:
    """Every rank has one; its calls must be made by all of them, in the same order."""

    def __init__(
        self, config: Config, engine: ShardedEngine, start: Start, console: Console, leave: LeaveRequest
    ):  # fmt: skip
        self._section, self._engine, self._record = config.checkpoint, engine, start.record
        self._console, self._leave = console, leave
        folder = checkpoint_folder(config)
        self._saver = Saver(folder, config.checkpoint.keep, start.together, self._saved, self._failed)
        # What the newest checkpoint in the run's own folder holds.
        own = start.checkpoint is not None and start.checkpoint.path.parent == folder
        self._newest = _place(start.progress) if own else None
        self._under_way = _place(start.progress)
        self._error: Exception | None = None  # of the last save
        self._start_s = 0.0

    def save(self, progress: Progress) -> None:
        """After every `save_interval` updates: beside training, if asked so."""
        self._begin(progress, beside=self._section.async_save)

    def save_last(self, progress: Progress) -> None:
        """When the run ends, if it has got further than its newest checkpoint.

        Raises: SaveFailedError on every rank.
        """
        self._begin(progress, beside=False)
        self._saver.finish()  # nobody would remove what is left over
        if self._error is not None:
            raise SaveFailedError(f"the last checkpoint could not be saved: {self._error}") from self._error

    def _begin(self, progress: Progress, *, beside: bool) -> None:
        self._saver.finish()
        if self._newest == _place(progress):
            return
        self._under_way, self._error, self._start_s = _place(progress), None, time.perf_counter()
        record = self._record.model_copy(update={"progress": progress.model_dump(mode="json")})
        (self._saver.start if beside else self._saver.save)(self._engine, record)

    def _saved(self, path: Path) -> None:
        self._newest = self._under_way
        self._console.line(f"saved {path} in {time.perf_counter() - self._start_s:.1f} s")

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._console.line(f"checkpoint NOT saved: {error}")
        if self._section.on_save_failure == "stop":
            self._leave.ask(SAVE_FAILED)


def _place(progress: Progress) -> tuple[int, int]:
    """Two of a run are equal where nothing has happened between them."""
    return progress.attempts, progress.validated
