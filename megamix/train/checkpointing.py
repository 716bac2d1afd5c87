"""Saves during a run: when it saves, the lines of the log on a save, and the consequences of a failed save."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megamix.base.console import Console
from megamix.base.signals import SAVE_FAILED, LeaveRequest
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import CHECKPOINTS, Files, applied_updates, checkpoints
from megamix.checkpoint.mirror import Mirror
from megamix.checkpoint.save import Saver, save
from megamix.checkpoint.slots import home_of, remove_home
from megamix.checkpoint.snapshot import take_snapshot
from megamix.config.sections import CheckpointConfig
from megamix.launch.exit_status import SaveFailedError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.copies import Copier, takes_of
from megamix.train.replicas import check_replicas
from megamix.train.resume import Resume
from megamix.train.run_record import Progress

COPIES_S = 600.0  # most seconds at the end of a run for copies of its checkpoints
_TICK_S = 0.2  # seconds between two signs that a rank waits for copies


class RunCheckpoints:
    """The checkpoints of a run. Every rank has such an object, and all ranks must make its calls in the same order.

    `all_or_none`: over a group that nothing else uses while a save may be under way.
    Every save begins with a replica check, if the run makes any, so that damaged memory is never saved.
    Raises: DamagedMemory on every rank; the older checkpoints stay as they were.
    """

    def __init__(
        self,
        section: CheckpointConfig,
        engine: ShardedEngine,
        resume: Resume,
        all_or_none: AllOrNone,
        console: Console,
        leave: LeaveRequest,
        note: Callable[..., None],
        mirror: Mirror | None = None,
    ):
        """`resume`: what the engine was loaded from, and what every checkpoint records. `note`: called with
        "save_begin" and "save_end" and what a save has to say, by the thread that saves. `mirror`: copies the state.
        """
        self._mirror, self._home = mirror, home_of(Path(section.folder))
        self._note = note
        self._section, self._engine, self._record = section, engine, resume.record
        self._all_or_none, self._console, self._leave = all_or_none, console, leave
        start, folder = resume.start, Path(section.folder, CHECKPOINTS)
        takes = [*takes_of(section, resume.record.config, self._stays, console.line)] if all_or_none.rank == 0 else []
        self._files = Files()
        self._saver = Saver(
            folder,
            section.keep,
            all_or_none,
            self._saved,
            self._failed,
            self._files,
            lambda path: self._stays(path) or any(path == copier.taking for copier in self._copiers),
            copy=mirror,
        )
        # Path and place in the run of the newest checkpoint in the run's own folder.
        own = start.checkpoint if start.checkpoint is not None and start.checkpoint.path.parent == folder else None
        self._path = own.path if own is not None else next(iter(checkpoints(folder)), None)
        self._newest = _place(start.progress) if own is not None else None
        self._under_way = _place(start.progress)
        self._copiers = [Copier(folder, take, console.line) for take in takes]
        self._waits = 0  # grows while this rank waits for copies
        self._error: Exception | None = None  # error of the last save
        self._start_s = 0.0
        self._took_s = -math.inf  # seconds of the last good save; -inf before it, so that a first save is always tried

    @property
    def written(self) -> int:
        """Return a number that grows while this rank writes, or waits for copies. Any thread may call it."""
        return self._files.written + self._waits

    def save(self, progress: Progress) -> None:
        """Save in the course of a run; beside training if `async_save` is set."""
        self._begin(progress, beside=self._section.async_save)

    def save_last(self, progress: Progress) -> None:
        """Save at the end of a run, unless its newest checkpoint is from the same place.

        Raises: SaveFailedError on every rank.
        """
        self._saver.finish()  # a save that is under way uses the same group
        self._all_or_none.every(self.finish_mirror)
        self._begin(progress, beside=False)
        self._saver.finish()  # no later save would remove unfinished files
        if self._error is not None:
            raise SaveFailedError(f"the last checkpoint could not be saved: {self._error}") from self._error
        remove_home(self._home)  # the disk has it all

    def save_leaving(self, progress: Progress) -> str:
        """Call `save_last`, unless the launcher would kill the ranks in the middle of the save. Return the outcome in
        words.
        """
        self._saver.finish()
        # The ranks exchange the times that are left: only ranks that got the signal know when it came, and each rank
        # has its own clock.
        by_rank = self._all_or_none.every(lambda: (self._took_s, self._leave.left_s()))
        took_s, left_s = max(took for took, _ in by_rank), min(left for _, left in by_rank)
        if took_s <= left_s or self._newest == _place(progress):
            self.save_last(progress)
            return f"saved {self._path}"
        return (
            f"NOT saved, because the last save took {took_s:.1f} s and the launcher kills its ranks in {left_s:.1f} s; "
            f"the newest checkpoint is {self._path}"
        )

    def save_weights(self, error: SaveFailedError, progress: Progress) -> SaveFailedError:
        """Save the weights alone after the failed `save_last`: they need a fraction of a checkpoint's space. Return its
        error with what is kept and what is lost. Every rank must call it.
        """
        lost = progress.applied - (0 if self._path is None else applied_updates(self._path))
        folder = Path(self._section.folder) / f"weights_after_{progress.applied}"
        try:
            path = save(folder, take_snapshot(self._engine, self._record).weights(), self._all_or_none, self._files)
            kept = f"only the weights are in {path}, for the checkpoint.resume of a new run in another folder"
        except Exception as second:  # it must not hide the first one
            kept = f"nor could the weights alone: {second}"
            with suppress(OSError):
                folder.rmdir()
        return SaveFailedError(f"{error}; {kept}; {lost} updates since {self._path or 'the beginning'} are lost")

    def finish_copies(self) -> None:
        """Wait at the end of a run for its copies, some minutes at most. Every rank must call it."""
        if self._section.copies is not None or self._section.copy_command:
            self._all_or_none.first(self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        end_s = time.monotonic() + COPIES_S
        for copier in self._copiers:
            copier.close()
        while not all(copier.ends_within(_TICK_S) for copier in self._copiers):
            self._waits += 1
            if self._leave.reason or time.monotonic() > end_s:
                break
        if not all(copier.has_taken_all for copier in self._copiers):
            self._console.line("copies of checkpoints are NOT finished; `megamix checkpoint copy` makes the rest")

    def _begin(self, progress: Progress, *, beside: bool) -> None:
        self._saver.finish()
        if self._newest == _place(progress):
            return
        if self._section.replica_check_interval:
            check_replicas(self._engine, progress.counters())
        self._under_way, self._error, self._start_s = _place(progress), None, time.perf_counter()
        self._note("save_begin")
        record = self._record.model_copy(update={"progress": progress.model_dump(mode="json")})
        (self._saver.start if beside else self._saver.save)(self._engine, record)

    def mirror(self, progress: Progress) -> None:
        """Copy the state as it is between two steps to shared memory. `finish_mirror` must follow before the next
        update.
        """
        assert self._mirror is not None
        self._mirror.take(self._record.model_copy(update={"progress": progress.model_dump(mode="json")}))

    def finish_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.finish()

    def _stays(self, path: Path) -> bool:
        update, keep_every = applied_updates(path), self._section.keep_every
        last = next((one for one in checkpoints(path.parent) if applied_updates(one) == update), path)
        return keep_every > 0 and update > 0 and update % keep_every == 0 and path == last

    def _saved(self, path: Path) -> None:
        self._newest, self._path = self._under_way, path
        if self._mirror is None:
            remove_home(self._home)  # of a start that had one
        self._took_s = time.perf_counter() - self._start_s
        self._note("save_end", saved=applied_updates(path), took_s=round(self._took_s, 3))
        self._console.line(f"saved {path} in {self._took_s:.1f} s")
        for copier in self._copiers:
            copier.wake()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._note("save_end", error=str(error))
        self._console.line(f"checkpoint NOT saved: {error}")
        if self._section.on_save_failure == "stop":
            self._leave.ask(SAVE_FAILED)


def _place(progress: Progress) -> tuple[int, int]:
    """Return how far a run is. Two places are equal if nothing has happened between them."""
    return progress.attempts, progress.validated
