"""The checkpoint from which a run goes on, and its way into the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megamix.base.console import say, say_phase
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import applied_updates, checkpoints
from megamix.checkpoint.in_memory import InMemory
from megamix.checkpoint.load import load, load_or_older, newest_checkpoint, read_on_all
from megamix.checkpoint.manifest import DamagedCheckpoint, Manifest, RunRecord
from megamix.checkpoint.slots import home_of
from megamix.checkpoint.verify import Checkpoint
from megamix.comm.topology import Axis
from megamix.config import ConfigError, Pace
from megamix.launch.journal import began_s, loads
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train.resume_rules import no_step_left, none_is_whole, path_is_damaged
from megamix.train.run_record import Progress, check_run
from megamix.train.second_phase import Continuation


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run, with or without a checkpoint. It is equal on every rank."""

    checkpoint: Checkpoint | None  # None: the run begins with new weights
    progress: Progress
    continuation: Continuation

    @property
    def is_from_memory(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.is_checked

    def lines(self, pace: Pace, folder: Path) -> list[str]:
        """Return the lines that say from where the run in `folder`, of this length, continues."""
        if self.checkpoint is None:
            return []
        path, applied = self.checkpoint.path, self.progress.applied
        if applied == 0 and not self.is_from_memory:  # imported weights
            return [f"begins with the weights of {path}", *self.continuation.lines]
        what = f"memory ({path})" if self.is_from_memory else path
        back = f"to go back to a checkpoint, before a start: megamix status {folder} --clear, on each machine"
        told = [f"goes on from {what} after update {applied}", *[back] * self.is_from_memory]
        if applied == pace.steps:
            told.append(f"the run {no_step_left(pace)}; its weights and sample are written again")
        return [*told, *self.continuation.lines]


class Resume:
    """Finds the checkpoint from which a run goes on, and loads it. Every rank must make its calls."""

    def __init__(self, folder: Path, resume: str, judge: Callable[[Path, Manifest], Continuation], record: RunRecord):
        """`folder`: the run's checkpoints. `resume`: checkpoint.resume. `judge`: returns how the run goes on from a
        checkpoint; raises ConfigError if it must not. `record`: what every checkpoint of this run gets, without its
        progress.
        """
        self._folder, self._resume, self._judge, self.record = folder, resume, judge, record
        self.start = Start(None, Progress(), Continuation([]))

    def find(self, world: Axis, all_or_none: AllOrNone) -> Progress:
        """Find the start, and compare its checkpoint with the configuration. Return its progress. The nodes' memory is
        looked into before the disk.

        `load_into` later verifies the bytes of the checkpoint's tensors.
        Raises: ConfigError on every rank if the run must not go on; the run's folder stays as it was.
        """
        told = all_or_none.first(lambda: self.record.model_dump(mode="json"))
        self.record = RunRecord.model_validate(told)
        found = None if self._resume == "never" else self._in_memory(world, all_or_none)
        self._take(found or find_checkpoint(self._folder, self._resume, all_or_none))
        return self.start.progress

    def _in_memory(self, world: Axis, all_or_none: AllOrNone) -> Checkpoint | None:
        """Return what the nodes' memory has of this run, unless it is older than the newest checkpoint."""
        folder = self._folder.parent
        began, went_on = all_or_none.first(lambda: (began_s(folder), loads(folder)))
        if began is None:
            return None
        saved = all_or_none.first(lambda: [*map(applied_updates, checkpoints(self._folder))])
        memory = InMemory(home_of(folder), began, went_on, world, all_or_none)
        found = memory.newest(self._is_alike)
        if found is not None and found.manifest.applied_updates < max(saved, default=0):
            return None
        if memory.why and all_or_none.rank == 0:
            say(f"megamix train: the nodes' memory has a newer state that is not whole: {memory.why}")
        if found is not None:
            check_run(found.manifest)
        return found

    def _is_alike(self, manifest: Manifest) -> bool:
        """Return whether this job's ranks, if they are as many, own the same shares."""
        then, now = manifest.run.tables(), self.record.tables()
        return all(then.get(name) == now.get(name) for name in ("model", "optimizer", "parallelism", "precision"))

    def load_into(self, engine: ShardedEngine, all_or_none: AllOrNone) -> Progress:
        """Load the checkpoint that the run goes on from. Return the progress of the one that was loaded.

        If the checkpoint is damaged, the newest good checkpoint before it in the run's folder is loaded.
        Raises: ConfigError on every rank if no checkpoint is good, or if the good one may not be loaded. The run ends
        with this error, so no engine trains on after a failed load.
        """
        found = self.start.checkpoint
        if found is None:
            return self.start.progress
        say_phase(f"loading {found.path}")
        try:
            if found.path.parent == self._folder:
                loaded = load_or_older(found, engine, all_or_none, check=check_run)
            else:
                load(found, engine, all_or_none, phase=self.start.continuation.phase)
                loaded = found
        except DamagedCheckpoint as error:
            raise path_is_damaged(error) from None
        except ConfigError:
            raise
        except ValueError as error:
            problem = f"checkpoint.resume: {error}; bring the configuration back, or write another checkpoint.folder"
            raise ConfigError([problem], "job") from None
        if loaded is None:
            raise none_is_whole(self._folder)
        if loaded is not found:
            self._take(loaded)
        return self.start.progress

    def _take(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            return
        continuation = self._judge(checkpoint.path, checkpoint.manifest)
        progress = Progress.read(checkpoint.manifest.run.progress)
        if not continuation.data_go_on:
            progress = progress.model_copy(update={"cursor": 0, "waiting": ()})
        self.start = Start(checkpoint, progress, continuation)


def find_checkpoint(folder: Path, resume: str, all_or_none: AllOrNone) -> Checkpoint | None:
    """Return the checkpoint that `resume` asks for. Return None for a run that begins with new weights.

    Every rank must call it.
    Checkpoints in the run's folder with a damaged manifest or damaged headers are set aside.
    Raises: ConfigError on every rank if all are damaged, or if the present code refuses the newest undamaged one.
    """
    if resume == "never":
        return None
    there_are_some = all_or_none.first(lambda: bool(checkpoints(folder)))
    if there_are_some:  # even if `resume` is a path: a restarted run goes on from its own checkpoints
        found = newest_checkpoint(folder, all_or_none, check=check_run)
        if found is None:
            raise none_is_whole(folder)
        return found
    if resume == "auto":
        return None
    try:
        return read_on_all(Path(resume), all_or_none, check_run)
    except DamagedCheckpoint as error:
        raise path_is_damaged(error) from None
